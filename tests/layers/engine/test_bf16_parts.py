"""Three bf16 parts of a hyper-connection's fp32 matrix: exact to 2^-24, and of the current matrix."""

import pytest
import torch
from torch import nn

import dsa
from dsa_layers.engine.fuse import fuse
from dsa_layers.engine.fused_hyper_block import split_in_bf16
from dsa_layers.layers.hyper_connections import HyperConnection, HyperHead


def value(parts):
    return parts.double().sum(0)


def test_the_parts_add_up_to_the_matrix():
    weight = torch.randn(24, 40) * torch.logspace(-20, 20, 40)
    parts = split_in_bf16(nn.Parameter(weight))
    assert parts.dtype == torch.bfloat16 and parts.shape == (3, 24, 40) and not parts.requires_grad
    assert ((value(parts) - weight).abs() <= weight.double().abs() * 2**-24).all()


@pytest.mark.parametrize("kind", [HyperConnection, HyperHead])
@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_layer_renews_its_parts_in_the_same_memory(kind, assign):
    layer, other = fuse(kind(64, 4)), kind(64, 4)
    nn.init.normal_(other.fn)
    kept = layer.fn_parts
    layer.load_state_dict(other.state_dict(), assign=assign)
    assert layer.fn_parts is kept and torch.equal(value(kept).float(), other.fn)
    assert layer.state_dict().keys() == {"fn", "base", "scale"}
    x = torch.randn(3, 4, 64).bfloat16()
    torch.testing.assert_close(dsa.hyper_mix(x, kept), layer.project(x), rtol=1e-5, atol=1e-5)


def test_moving_a_layer_moves_its_parts():
    layer = fuse(HyperConnection(64, 4))
    layer.double().float()
    assert layer.fn_parts.dtype == torch.bfloat16
    layer.to("meta")
    assert layer.fn_parts.is_meta
