"""SASS of router, gate and sort in one kernel."""

from dsa.kernels.moe import route_to_experts_sm90 as kernels
from dsa.kernels.moe.route_to_experts_limits import MAX_EXPERTS, TILE_TOKENS
from tests.kernels.moe.routing import check_router, gate_reductions
from tests.kernels.variants import sass_of, shipped


@shipped(kernels.compile_route_to_experts)
def test_sass(sass, arguments):
    _, tokens, experts, top_k, _, n_group, topk_group, _ = arguments
    check_router(sass, tokens, loads=2 * (experts // 32), reductions=gate_reductions(top_k, n_group, topk_group))
    assert sass.registers <= 65536 // 512


def test_the_largest_call_does_not_spill():
    """16 is half of the largest top_k."""
    variant = "float16", TILE_TOKENS, MAX_EXPERTS, 16, "sqrtsoftplus", 32, 8, True
    assert sass_of(kernels.compile_route_to_experts, *variant).stack == 0
