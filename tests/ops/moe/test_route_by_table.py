"""`route_by_table` on the CPU: which kernel it launches, and which variants ship."""

import pytest
import torch

import dsa
from dsa.kernels.moe import route_by_table_sm90 as kernels
from dsa.kernels.moe.route_to_experts_limits import DTYPES, FEW_TOKENS, MAX_TOKENS, TILE_TOKENS
from dsa.ops.moe import route_by_table as op
from dsa.runtime import backends
from dsa.runtime.checks import dtype_name


def inputs(tokens=7, channels=64, experts=32, top_k=3, dtype=torch.bfloat16):
    torch.manual_seed(tokens)
    table = torch.randint(experts, (9, top_k))
    x, weight = torch.randn(tokens, channels).to(dtype), torch.randn(experts, channels).to(dtype)
    return x, weight, table, torch.randint(9, (tokens,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "tokens, tile", [(1, FEW_TOKENS), (FEW_TOKENS, FEW_TOKENS), (9, TILE_TOKENS), (MAX_TOKENS, TILE_TOKENS)]
)
def test_tokens_choose_the_tile(tokens, tile, dtype, launches):
    dsa.route_by_table(*inputs(tokens, dtype=dtype))
    [(variant, _)] = launches
    assert variant == (dtype_name(dtype), tile, 32, 3)


def test_what_ships():
    from dsa.kernels.moe import moe_gate_sm90

    gates = {arguments[:2] for _, arguments in moe_gate_sm90.shipped_variants() if arguments[2] == "sqrtsoftplus"}
    shipped = {arguments for _, arguments in kernels.shipped_variants()}
    assert shipped == {(DTYPES[0], tile, *gate) for gate in gates for tile in (FEW_TOKENS, TILE_TOKENS)}
    assert backends.ARCHS["route_by_table"] == ["sm_90"] and op.__all__ == ["route_by_table"]
