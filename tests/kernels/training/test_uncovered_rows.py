"""Every shipped variant of the kernel that fills uncovered rows compiles to sm_90a, without a stack."""

from dsa.kernels.training import uncovered_rows_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_uncovered_rows)
def test_sass(arguments):
    sass = disassemble(cubin(kernels.compile_uncovered_rows, *arguments))
    assert sass.stack == 0 and sass.registers <= 64
    # A store into each tensor, for the rows before, behind and inside the sequences.
    assert sass.instructions["STG"] == 3 * len(arguments[0])
