"""SASS of multi-head attention: the compiler adds no waits for wgmma, so wgmma is in flight during the softmax."""

from dsa.kernels.mla import mha_varlen_fwd_sm90 as kernels
from dsa.kernels.mla.limits import MHA_DIMS
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_mha_varlen_fwd)
def test_sass(sass, arguments):
    _, config, rope, selected = arguments
    # The code contains S = Q K^T of the first key block before the loop, and both products (S and O += P V) in the loop
    # and after it.
    assert_counts(sass, HGMMA=3 * config.dim // 16 + 2 * config.keys // 16)
    # TMA boxes have 64 channels. Loads: queries, a block of keys, and a block of values. If the keys' RoPE channels are
    # in a separate tensor, the number of boxes is the same, because `rope` is a multiple of 64.
    assert_counts(sass, UTMALDG=(2 * config.dim + config.value_dim) // 64)
    assert rope % 64 == 0
    # WARPGROUP: 5 starts of wgmma groups and 5 waits, as in the source. More would mean that the compiler has added
    # waits.
    assert_counts(sass, WARPGROUP=5 + 5)
    # Each R2P moves a byte of selection bits to predicates (mha_consumer.py). A lane has keys / 32 bytes for each of
    # its two rows. They are moved for the maxima and for the exponentials, in code before the loop and in the loop.
    assert_counts(sass, R2P=2 * 2 * 2 * config.keys // 32 if selected else 0)
    assert config.fits()


def test_all_channels_have_a_config():
    assert set(MHA_DIMS) == set(kernels.CONFIGS)
