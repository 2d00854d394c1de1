"""Router and sort by a table of experts compile to sm_90a without spills."""

from dsa.cute.few_rows_product import CTAS, ROUND
from dsa.kernels.moe import entry_order
from dsa.kernels.moe import route_by_table_sm90 as kernels
from dsa.kernels.moe.route_to_experts_limits import MAX_EXPERTS, TILE_TOKENS
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped


@shipped(kernels.compile_route_by_table)
def test_sass(arguments):
    _, tokens, _, _ = arguments
    sass = disassemble(cubin(kernels.compile_route_by_table, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    # The product's; then a lane's token, its place in the table, and one logit.
    assert sass.instructions["LDG"] == ROUND[CTAS, tokens] * (2 + tokens // 8) + 3
    assert sass.instructions["HMMA"] == 2 * ROUND[CTAS, tokens] * tokens // 8
    assert sass.instructions["REDUX"] == entry_order.BATCH
    # Groups of channels go to another CTA, and of more than a few tokens so do keys, to eight.
    assert sass.instructions["ST"] == 1 + (entry_order.CTAS if tokens == TILE_TOKENS else 0)


def test_the_most_that_it_takes_does_not_spill():
    """Which compiling says: fp16, all experts and places that there may be."""
    assert disassemble(cubin(kernels.compile_route_by_table, "float16", TILE_TOKENS, MAX_EXPERTS, 32)).stack == 0
