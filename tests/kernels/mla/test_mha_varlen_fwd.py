"""SASS of multi-head attention: wgmma is in flight during the softmax."""

from dsa.kernels.mla import mha_varlen_fwd_sm90 as kernels
from dsa.kernels.mla.limits import MHA_DIMS
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_mha_varlen_fwd)
def test_sass(sass, arguments):
    _, config, rope, selected = arguments
    # The first scores' product, and both products in the loop and after it.
    assert_counts(sass, HGMMA=3 * config.dim // 16 + 2 * config.keys // 16)
    # Boxes of 64 channels: queries, a block of keys (with rope channels in the same or in a separate tensor), and
    # values.
    assert_counts(sass, UTMALDG=(2 * config.dim + config.value_dim) // 64)
    assert rope % 64 == 0
    # One wait per group, and two for the group during which the softmax runs: the compiler has added no waits.
    assert_counts(sass, WARPGROUP=5 + 5)
    # Bits are moved to predicates bytewise, for a lane's two rows, for maxima and for powers, before the loop and in
    # it.
    assert_counts(sass, R2P=2 * 2 * 2 * config.keys // 32 if selected else 0)
    assert config.fits()


def test_all_channels_have_a_config():
    assert set(MHA_DIMS) == set(kernels.CONFIGS)
