"""SASS checks that the kernels of index scores share."""

from tests.kernels.variants import assert_counts


def check_products(sass, dim, columns, half):
    """Check the counts of wgmma, and of instructions on the accumulators of 64 keys x `columns` (query, head) pairs.

    fp32: one multiply-add per accumulator. half: one multiply-add and one maximum per two accumulators. Other counts
    would mean that the compiler has split or dropped some.
    """
    assert_counts(sass, QGMMA=dim // 32)
    if half:
        assert_counts(sass, HFMA2=columns // 4, HMNMX2=columns // 4, FFMA=0)
    else:
        assert_counts(sass, FFMA=columns // 2)
