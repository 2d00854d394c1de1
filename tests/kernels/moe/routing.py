"""SASS checks that the kernels that route tokens share."""

from dsa.cute.small_m_product import CTAS, ROUND
from dsa.kernels.moe import entry_order
from dsa.kernels.moe.route_to_experts_limits import TILE_TOKENS
from tests.kernels.variants import assert_counts


def check_router(sass, tokens, loads, reductions):
    """Check a round's loads (two rows of the matrix, one load per eight tokens), and the additional loads and
    reductions beyond those of the product and the sort."""
    round_ = ROUND[CTAS, tokens]
    assert_counts(sass, LDG=round_ * (2 + tokens // 8) + loads, HMMA=2 * round_ * tokens // 8)
    assert_counts(sass, REDUX=reductions + entry_order.BATCH)
    # Partial sums are sent to another CTA. With more than a few tokens, keys are also sent to eight CTAs.
    assert_counts(sass, ST=1 + (entry_order.CTAS if tokens == TILE_TOKENS else 0))


def gate_reductions(top_k, n_group, topk_group):
    groups = 2 * n_group if n_group > topk_group else 0
    return 2 * top_k + groups
