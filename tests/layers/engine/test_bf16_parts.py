"""Three bf16 parts of an fp32 matrix: exact to 2^-24, and always those of the current matrix."""

import copy

import pytest
import torch
from torch import nn

import dsa
from dsa_layers.engine.bf16_parts import BF16Parts
from dsa_layers.engine.fuse import fuse
from dsa_layers.layers.hyper_connections import HyperConnection, HyperHead


@pytest.fixture
def weight():
    return nn.Parameter(torch.randn(24, 40) * torch.logspace(-20, 20, 40))


def value(parts):
    return parts.double().sum(0)


def is_of(parts, weight):
    return torch.equal(value(parts.of(weight)).float(), weight)


def test_the_parts_add_up_to_the_matrix(weight):
    kept = BF16Parts()
    parts = kept.of(weight)
    assert parts.dtype == torch.bfloat16 and parts.shape == (3, 24, 40) and not parts.requires_grad
    assert ((value(parts) - weight).abs() <= weight.double().abs() * 2**-24).all()
    assert kept.of(weight) is parts


CHANGES = {
    "in place": lambda weight: weight.detach().mul_(3),
    "another tensor": lambda weight: torch.randn(24, 40),
    "another shape": lambda weight: torch.randn(4, 40),
    "some of its rows": lambda weight: weight.detach()[:4],
    "its data": lambda weight: setattr(weight, "data", torch.randn(24, 40)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("inference", [False, True])
def test_the_parts_follow_a_changed_matrix(weight, change, inference):
    parts = BF16Parts()
    for _ in range(2):
        with torch.inference_mode(inference):
            assert is_of(parts, weight)
        changed = change(weight)
        weight = weight if changed is None else changed
    assert is_of(parts, weight)


def test_a_tensor_of_inference_mode_is_split_at_each_use():
    parts = BF16Parts()
    with torch.inference_mode():
        weight = torch.randn(24, 40)
        assert is_of(parts, weight)
        weight.mul_(2)
        assert is_of(parts, weight)


def test_new_parts_are_written_to_the_memory_of_the_old_ones(weight):
    """A captured CUDA graph reads this memory. A copy of the layer has its own."""
    parts = BF16Parts()
    with torch.inference_mode():
        kept = parts.of(weight)
    weight.detach().mul_(3)
    parts.update(weight)
    assert torch.equal(value(kept).float(), weight)
    weight.data.mul_(2)  # PyTorch does not count this change
    parts.forget()
    assert is_of(parts, weight)
    assert copy.deepcopy(parts)._parts is None
    parts.update(weight.to("meta"))
    assert parts._parts is None


@pytest.mark.parametrize("kind", [HyperConnection, HyperHead])
@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_layer_updates_its_parts(kind, assign):
    layer, other = fuse(kind(64, 4)), kind(64, 4)
    nn.init.normal_(other.fn)
    kept = layer._fn_parts.of(layer.fn)
    layer.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(value(kept).float(), other.fn)
    assert layer.state_dict().keys() == {"fn", "base", "scale"}
    x = torch.randn(3, 4, 64).bfloat16()
    torch.testing.assert_close(dsa.hyper_mix(x, kept), layer.project(x), rtol=1e-5, atol=1e-5)
    layer.double().float()
    assert layer._fn_parts.of(layer.fn) is kept
    layer.to("meta")
    assert layer._fn_parts._parts is None
