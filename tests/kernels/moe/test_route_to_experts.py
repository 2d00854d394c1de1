"""Router, gate and sort in one compile to sm_90a without spills, all loads of a round in flight before its products."""

from dsa.cute.few_rows_product import CTAS, ROUND
from dsa.kernels.moe import entry_order
from dsa.kernels.moe import route_to_experts_sm90 as kernels
from dsa.kernels.moe.route_to_experts_limits import MAX_EXPERTS, TILE_TOKENS
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_route_to_experts)
def test_sass(arguments):
    _, tokens, experts, top_k, _, n_group, topk_group, _ = arguments
    sass = disassemble(cubin(kernels.compile_route_to_experts, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 65536 // 512
    # Two rows of the matrix and each eight tokens; then a lane's logits and bias.
    assert sass.instructions["LDG"] == ROUND[CTAS, tokens] * (2 + tokens // 8) + 2 * (experts // 32)
    assert sass.instructions["HMMA"] == 2 * ROUND[CTAS, tokens] * tokens // 8
    groups = 2 * n_group if n_group > topk_group else 0
    assert sass.instructions["REDUX"] == 2 * top_k + groups + entry_order.BATCH
    # Groups of channels go to another CTA, and of more than a few tokens so do keys, to eight.
    assert sass.instructions["ST"] == 1 + (entry_order.CTAS if tokens == TILE_TOKENS else 0)


def test_the_most_that_it_takes_does_not_spill():
    """Which compiling says: fp16, all experts that there may be, and half of the most that a token selects of them."""
    variant = "float16", TILE_TOKENS, MAX_EXPERTS, 16, "sqrtsoftplus", 32, 8, True
    assert disassemble(cubin(kernels.compile_route_to_experts, *variant)).stack == 0
