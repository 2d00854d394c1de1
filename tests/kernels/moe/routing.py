"""SASS checks common to all kernels that route tokens."""

from dsa.cute.small_m_product import CTAS, ROUND
from dsa.kernels.moe import entry_order
from dsa.kernels.moe.route_to_experts_limits import TILE_TOKENS
from tests.kernels.variants import assert_counts


def check_router(sass, tokens, loads, reductions):
    """loads, reductions: the expected counts without the loads of the product and the reductions of the sort. Per
    k-step of a round (small_m_product.py), a lane executes two loads of the matrix and one load of x per eight
    tokens."""
    round_ = ROUND[CTAS, tokens]
    assert_counts(sass, LDG=round_ * (2 + tokens // 8) + loads, HMMA=2 * round_ * tokens // 8)
    assert_counts(sass, REDUX=reductions + entry_order.BATCH)
    # One store sends partial sums to another CTA. With TILE_TOKENS, a cluster sorts the entries (entry_order.py), and
    # one more store per CTA sends the sort keys.
    assert_counts(sass, ST=1 + (entry_order.CTAS if tokens == TILE_TOKENS else 0))


def gate_reductions(top_k, n_group, topk_group):
    groups = 2 * n_group if n_group > topk_group else 0
    return 2 * top_k + groups
