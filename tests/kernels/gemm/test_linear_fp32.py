"""Products in fp32 compile to sm_90a without spills, all loads of a round in flight before its products, two CTAs a
multiprocessor."""

from dsa.cute.few_rows_product import CTAS, ROUND
from dsa.kernels.gemm import linear_fp32_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble, instructions_in_order
from tests.kernels.variants import shipped


@shipped(kernels.compile_linear_fp32)
def test_sass(arguments):
    _, (tokens, ctas) = arguments
    code = cubin(kernels.compile_linear_fp32, *arguments)
    sass = disassemble(code)
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 65536 // 512
    round_ = ROUND[ctas, tokens]
    # Two rows of the matrix and each eight tokens.
    assert sass.instructions["LDG"] == round_ * (2 + tokens // 8)
    assert sass.instructions["HMMA"] == 2 * round_ * tokens // 8
    # A cluster's groups go to another CTA, and only a cluster's.
    assert sass.instructions["ST"] == (1 if ctas == CTAS else 0)
    [instructions] = instructions_in_order(code)
    assert "LDG" not in instructions[instructions.index("HMMA") :]
    # The matrix is asked for before the wait for the kernel in front.
    assert instructions.index("UBLKPF") < instructions.index("ACQBULK")
