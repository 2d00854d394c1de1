"""The bridge of router, gate and sort in one: the reference on a CPU, what it launches, torch.compile, and errors."""

import pytest
import torch

import dsa
from dsa import backends
from dsa.kernels.moe import route_to_experts_sm90 as kernels
from dsa.kernels.moe.route_to_experts_limits import DTYPES, FEW_TOKENS, MAX_TOKENS, TILE_TOKENS
from dsa.ops.moe import route_to_experts as op

OPTIONS = {"scores": "sigmoid", "n_group": 4, "topk_group": 2, "normalise": True, "scale": 2.5}


def inputs(tokens=7, channels=64, experts=32, dtype=torch.bfloat16):
    torch.manual_seed(tokens)
    return torch.randn(tokens, channels).to(dtype), torch.randn(experts, channels).to(dtype), torch.randn(experts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "tokens, tile", [(1, FEW_TOKENS), (FEW_TOKENS, FEW_TOKENS), (9, TILE_TOKENS), (MAX_TOKENS, TILE_TOKENS)]
)
def test_what_the_kernel_gets(tokens, tile, dtype, launches):
    x, weight, bias = inputs(tokens, dtype=dtype)
    results = dsa.route_to_experts(x, weight, bias, 3, **OPTIONS, first_expert=8, count=16)
    [(variant, (*tensors, first_expert, scale))] = launches
    assert variant == (dtype, tile, 32, 3, "sigmoid", 4, 2, True) and (first_expert, scale) == (8, 2.5)
    assert [t.data_ptr() for t in tensors[:3]] == [t.data_ptr() for t in (x, weight, bias)]
    assert tensors[3].shape == (tokens, 32) and tensors[3].dtype == torch.float32
    assert [t.data_ptr() for t in tensors[4:]] == [t.data_ptr() for t in results]
    assert [t.shape for t in results] == [(tokens, 3), (tokens, 3), (3 * tokens,), (tokens, 3), (16,)]
    assert tensors[7].shape == (3 * tokens,)


def test_rows_with_gaps_are_read_where_they_are(launches):
    x, weight, bias = inputs()
    wide = torch.nn.functional.pad(x, (8, 24))[:, 8:72]
    dsa.route_to_experts(wide, weight, torch.stack([bias, bias], 1)[:, 0], 3)
    [(_, (given, _, own_bias, *_))] = launches
    assert given.data_ptr() == wide.data_ptr() and given.stride() == (96, 1) and own_bias.stride() == (1,)


def test_what_ships():
    """The models' gates, of which the gate's kernel says the same, with each tile."""
    from dsa.kernels.moe import moe_gate_sm90

    gates = {arguments for _, arguments in moe_gate_sm90.shipped_variants()}
    shipped = {arguments for _, arguments in kernels.shipped_variants()}
    assert shipped == {(DTYPES[0], tile, *gate) for gate in gates for tile in (FEW_TOKENS, TILE_TOKENS)}
    assert backends.KERNELS["route_to_experts"] == {"sm_90": kernels.__name__}
    assert op.__all__ == ["route_to_experts"]
