"""SASS checks that the kernels of index scores share."""

from tests.kernels.variants import assert_counts


def check_products(sass, dim, columns, half):
    """Check one multiply-add per accumulator, or with fp16 scores one multiply-add and one maximum per two
    accumulators: the compiler has neither split nor dropped any."""
    assert_counts(sass, QGMMA=dim // 32)
    if half:
        assert_counts(sass, HFMA2=columns // 4, HMNMX2=columns // 4, FFMA=0)
    else:
        assert_counts(sass, FFMA=columns // 2)
