"""`route_to_experts` on the CPU: which kernel it launches, and which variants ship."""

import pytest
import torch

import dsa
from dsa.kernels.moe import route_to_experts_sm90 as kernels
from dsa.kernels.moe.route_to_experts_limits import DTYPES, FEW_TOKENS, MAX_TOKENS, TILE_TOKENS
from dsa.ops.moe import route_to_experts as op
from dsa.runtime import backends
from dsa.runtime.checks import dtype_name

OPTIONS = {"scores": "sigmoid", "n_group": 4, "topk_group": 2, "normalise": True, "scale": 2.5}


def inputs(tokens=7, channels=64, experts=32, dtype=torch.bfloat16):
    torch.manual_seed(tokens)
    return torch.randn(tokens, channels).to(dtype), torch.randn(experts, channels).to(dtype), torch.randn(experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "tokens, tile", [(1, FEW_TOKENS), (FEW_TOKENS, FEW_TOKENS), (9, TILE_TOKENS), (MAX_TOKENS, TILE_TOKENS)]
)
def test_tokens_choose_the_tile(tokens, tile, dtype, launches):
    dsa.route_to_experts(*inputs(tokens, dtype=dtype), 3, **OPTIONS)
    [(variant, _)] = launches
    assert variant == (dtype_name(dtype), tile, 32, 3, "sigmoid", 4, 2, True)


def test_what_ships():
    from dsa.kernels.moe import moe_gate_sm90

    gates = {arguments for _, arguments in moe_gate_sm90.shipped_variants()}
    shipped = {arguments for _, arguments in kernels.shipped_variants()}
    assert shipped == {(DTYPES[0], tile, *gate) for gate in gates for tile in (FEW_TOKENS, TILE_TOKENS)}
    assert backends.ARCHS["route_to_experts"] == ["sm_90"] and op.__all__ == ["route_to_experts"]
