"""SASS checks that the kernels of index scores share."""

from tests.kernels.variants import assert_counts


def check_products(sass, dim, columns, half):
    """Check the number of wgmma, and of the instructions that process the accumulators of a score tile. A score tile is
    64 keys x `columns`, and a column is a (query, head) pair.

    fp32: one multiply-add per accumulator. fp16 accumulation (half): one multiply-add and one maximum for every two
    accumulators. Other counts would mean that the compiler has split or dropped some of these instructions.
    """
    assert_counts(sass, QGMMA=dim // 32)
    if half:
        assert_counts(sass, HFMA2=columns // 4, HMNMX2=columns // 4, FFMA=0)
    else:
        assert_counts(sass, FFMA=columns // 2)
