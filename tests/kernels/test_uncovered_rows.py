"""Every shipped variant of the kernel that fills uncovered rows compiles to sm_90a, without a stack."""

import pytest

from dsa.cute.compile_cache import cubin
from dsa.cute.sass import disassemble
from dsa.kernels import uncovered_rows_sm90 as kernels


@pytest.mark.parametrize(("compile_function", "arguments"), kernels.shipped_variants())
def test_sass(compile_function, arguments):
    sass = disassemble(cubin(compile_function, *arguments))
    assert sass.stack == 0 and sass.registers <= 64
    # A store into each tensor, for the rows before, behind and inside the sequences.
    assert sass.instructions["STG"] == 3 * len(arguments[0])
