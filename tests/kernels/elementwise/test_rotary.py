"""The shipped variants of the rotation compile to sm_90a without spills, with wide loads and unfused products."""

from dsa.kernels.elementwise import limits
from dsa.kernels.elementwise import rotary_sm90 as kernels
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_apply_rotary)
def test_sass(arguments):
    dtype, interleaved, config = arguments
    sass = disassemble(cubin(kernels.compile_apply_rotary, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 40  # 48 warps a multiprocessor
    # A unit's vectors, and as many loads of cos and sin. More would be narrower ones.
    vectors = 2 if config.pairs == 1 or dtype == "float32" or not interleaved else 1
    assert sass.instructions["LDG"] == config.groups * (vectors + 2)
    assert sass.instructions["STG"] == config.groups * vectors
    # Each product is rounded before it is added.
    assert sass.instructions["FFMA"] == 0
    assert sass.instructions["FMUL"] == 4 * config.pairs * config.groups
    assert sass.instructions["FADD"] == 2 * config.pairs * config.groups


def test_every_variant_is_shipped_once():
    variants = [arguments for _, arguments in kernels.shipped_variants()]
    assert len(variants) == len(set(variants)) == 2 * (3 + 3 + 2)


def test_the_number_of_a_group_is_an_int32():
    of_a_cta = max(config.groups * config.threads for _, (_, _, config) in kernels.shipped_variants())
    assert limits.MAX_ROTARY_GROUPS + of_a_cta < 2**31
