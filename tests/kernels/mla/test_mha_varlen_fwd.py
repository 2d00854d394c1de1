"""SASS of multi-head attention: the compiler adds no waits for wgmma, so wgmma is in flight during the softmax."""

from dsa.kernels.mla import mha_varlen_fwd_sm90 as kernels
from dsa.kernels.mla.limits import MHA_DIMS
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_mha_varlen_fwd)
def test_sass(sass, arguments):
    _, config, rope, selected, _ = arguments
    # S = Q K^T is in the code three times: before the loop, in it and after it. O += P V is in the loop and after it.
    assert_counts(sass, HGMMA=3 * config.dim // 16 + 2 * config.keys // 16)
    # TMA boxes have 64 channels of queries, of a block of keys, or of a block of values. RoPE channels in a separate
    # tensor do not change the number of boxes, because `rope` is a multiple of 64.
    assert_counts(sass, UTMALDG=(2 * config.dim + config.value_dim) // 64)
    assert rope % 64 == 0
    # 5 starts of wgmma groups and 5 waits, as in the source. More would mean that the compiler has added waits.
    assert_counts(sass, WARPGROUP=5 + 5)
    # R2P moves a byte of selection bits to predicates (mha_consumer.py). A lane has keys / 32 bytes in each of two
    # rows. They are moved for maxima and for exponentials, before the loop and in it.
    assert_counts(sass, R2P=2 * 2 * 2 * config.keys // 32 if selected else 0)
    assert config.fits()


def test_all_channels_have_a_config():
    assert set(MHA_DIMS) == set(kernels.CONFIGS)
