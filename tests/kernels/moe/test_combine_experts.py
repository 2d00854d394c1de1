"""Every shipped variant of the experts' sum compiles to sm_90a without spills, with a turn's copies in flight."""

from dsa.kernels.moe import combine_experts_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_combine_experts)
def test_sass(arguments):
    dtype, numbers, weighted, shared, residual = arguments
    sass = disassemble(cubin(kernels.compile_combine_experts, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # 10 CTAs a multiprocessor, or without weights 9, with as many bytes in flight as memory asks for; shared memory is
    # enough for 13. Numbers of 64 bits beside both addends take two registers more, and so a CTA's room.
    assert sass.registers <= (48 if weighted else 56) + 2 * (numbers == "int64" and shared and residual)
    assert sass.instructions["LDGSTS"] == kernels.BATCH and sass.instructions["LDGDEPBAR"] == 1
    # A row's number and weight; shared's and residual's vectors.
    assert sass.instructions["LDG"] == (1 + weighted) * kernels.BATCH + shared + residual
    assert sass.instructions["STG"] == 1
    # Products are rounded before they are added.
    assert sass.instructions["FMUL"] == weighted * kernels.BATCH * (4 if dtype == "float32" else 8)


def test_every_variant_is_shipped_once():
    variants = [arguments for _, arguments in kernels.shipped_variants()]
    assert len(variants) == len(set(variants)) == 3 * 2 * 2 * 2 * 2
