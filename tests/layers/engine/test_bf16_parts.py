"""An fp32 matrix as three bf16 parts: exact to 2^-24, and never those of another matrix."""

import copy
import pickle

import pytest
import torch
from torch import nn

from dsa_layers.layers import hyper_connections
from dsa_layers.engine.bf16_parts import BF16Parts
from dsa_layers.layers.hyper_connections import HyperConnection, HyperHead


@pytest.fixture
def weight():
    return nn.Parameter(torch.randn(24, 40) * torch.logspace(-20, 20, 40))


def value(parts):
    return parts.double().sum(0)


def is_of(parts, weight):
    return torch.equal(value(parts.of(weight)).float(), weight)


def test_the_parts_are_the_matrix(weight):
    kept = BF16Parts()
    parts = kept.of(weight)
    assert parts.dtype == torch.bfloat16 and parts.shape == (3, 24, 40) and not parts.requires_grad
    assert ((value(parts) - weight).abs() <= weight.double().abs() * 2**-24).all()
    assert kept.of(weight) is parts


def in_place(weight):
    with torch.no_grad():
        weight.mul_(3)
    return weight


CHANGES = {
    "in place": in_place,
    "through an alias": lambda weight: (weight.detach().add_(1), weight)[1],
    "another tensor": lambda weight: nn.Parameter(torch.randn(24, 40)),
    "another shape": lambda weight: nn.Parameter(torch.randn(4, 40)),
    "a part of it": lambda weight: weight.detach()[:4],
    "its data": lambda weight: (setattr(weight, "data", torch.randn(24, 40)), weight)[1],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("inference", [False, True])
def test_they_follow_the_matrix(weight, change, inference):
    parts = BF16Parts()
    for _ in range(2):
        with torch.inference_mode(inference):
            assert is_of(parts, weight)
        weight = change(weight)
    assert is_of(parts, weight)


def test_the_memory_of_a_dropped_matrix_is_not_taken_for_it():
    parts = BF16Parts()
    for _ in range(20):  # of which the allocator would give some the same address
        assert is_of(parts, nn.Parameter(torch.randn(24, 40)))


def test_a_matrix_of_inference_mode_is_split_each_time():
    parts = BF16Parts()
    with torch.inference_mode():
        weight = torch.randn(24, 40)
        assert is_of(parts, weight)
        weight.mul_(2)
        assert is_of(parts, weight)


def test_copies_have_no_parts(weight):
    parts = BF16Parts()
    parts.of(weight)
    for other in (copy.deepcopy(parts), pickle.loads(pickle.dumps(parts))):
        other.update(weight)
        assert other._parts is None


def test_new_parts_are_where_the_old_ones_were_until_they_are_dropped(weight):
    """A graph that reads them goes on with the new ones."""
    parts = BF16Parts()
    with torch.inference_mode():
        kept = parts.of(weight)
    parts.update(in_place(weight))
    assert torch.equal(value(kept).float(), weight)
    weight.data.mul_(2)  # is not counted
    parts.forget()
    assert is_of(parts, weight)
    parts.update(weight.to("meta"))
    assert parts._parts is None


@pytest.mark.parametrize("make", [lambda: HyperConnection(8, 4), lambda: HyperHead(8, 4)])
@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_that_loads_updates_them(make, assign):
    layer, other = make(), make()
    nn.init.normal_(other.fn)
    kept = layer._fn_parts.of(layer.fn)
    layer.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(value(kept).float(), other.fn)
    assert layer.state_dict().keys() == {"fn", "base", "scale"}
    layer.double().float()
    assert layer._fn_parts.of(layer.fn) is kept
    layer.to("meta")
    assert layer._fn_parts._parts is None
    assert copy.deepcopy(other).fn.equal(other.fn)


@pytest.mark.parametrize("make", [lambda: HyperConnection(64, 4), lambda: HyperHead(64, 4)])
def test_the_parts_are_what_the_projection_takes(make):
    layer = make()
    nn.init.normal_(layer.fn)
    x = torch.randn(3, 4, 64).bfloat16()
    with torch.no_grad():
        got = hyper_connections.dsa.hyper_mix(x, layer._fn_parts.of(layer.fn))
        torch.testing.assert_close(got, layer.project(x), rtol=1e-5, atol=1e-5)
