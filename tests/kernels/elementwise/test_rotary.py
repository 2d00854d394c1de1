"""SASS of the rotation: wide loads, and products that are not fused with additions."""

from dsa.kernels.elementwise import limits
from dsa.kernels.elementwise import rotary_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_apply_rotary)
def test_products_are_rounded_before_they_are_added(sass, arguments):
    dtype, interleaved, config = arguments
    # LDG per group (rotary_sm90.py): one or two vectors, and one load each of cosines and sines. A larger count would
    # mean narrower loads.
    vectors = 2 if config.pairs == 1 or dtype == "float32" or not interleaved else 1
    assert_counts(sass, LDG=config.groups * (vectors + 2), STG=config.groups * vectors)
    products = 4 * config.pairs * config.groups
    assert_counts(sass, FFMA=0, FMUL=products, FADD=products // 2)
    assert sass.registers <= 40  # allows 48 warps per SM


def test_the_number_of_a_group_is_an_int32():
    groups_per_cta = max(config.groups * config.threads for _, (_, _, config) in kernels.shipped_variants())
    assert limits.MAX_ROTARY_GROUPS + groups_per_cta < 2**31
