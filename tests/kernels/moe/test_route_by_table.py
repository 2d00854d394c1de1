"""SASS of router and sort in one kernel, in which a table gives the experts of each token ID."""

from dsa.kernels.moe import route_by_table_sm90 as kernels
from dsa.kernels.moe.route_to_experts_limits import MAX_EXPERTS, TILE_TOKENS
from tests.kernels.moe.routing import check_router
from tests.kernels.variants import sass_of, shipped


@shipped(kernels.compile_route_by_table)
def test_sass(sass, arguments):
    _, tokens, _, _ = arguments
    # Loads: a lane's token ID, an expert from the table, and one logit.
    check_router(sass, tokens, loads=3, reductions=0)


def test_the_largest_call_does_not_spill():
    """32 is the largest number of table columns."""
    assert sass_of(kernels.compile_route_by_table, "float16", TILE_TOKENS, MAX_EXPERTS, 32).stack == 0
