"""The bridges of the gate and of the sort by expert: the reference on a CPU, torch.compile, and what kernels take."""

import math
import re

import pytest
import torch

import dsa
from dsa import backends, reference
from dsa.kernels.moe.limits import MAX_SORT_ENTRIES
from dsa.kernels.moe.sort_by_expert_sm90 import AHEAD, WARPS


def test_the_cpu_runs_the_references():
    torch.manual_seed(0)
    logits, bias = torch.randn(7, 32), torch.randn(32)
    options = {"scores": "sigmoid", "n_group": 4, "topk_group": 2, "normalise": True, "scale": 2.5}
    for got, expected in zip(dsa.moe_gate(logits, bias, 3, **options), reference.moe_gate(logits, bias, 3, **options)):
        assert torch.equal(got, expected)
    experts = torch.randint(-1, 9, (7, 3))
    for got, expected in zip(dsa.sort_by_expert(experts, 8), reference.sort_by_expert(experts, 8)):
        assert torch.equal(got, expected)


def test_compiles_into_one_graph():
    def run(logits, bias):
        experts, weights = dsa.moe_gate(logits, bias, 2, n_group=2, topk_group=1)
        return (*dsa.sort_by_expert(experts, 8), weights)

    torch.manual_seed(1)
    logits, bias = torch.randn(5, 8), torch.randn(8)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(logits, bias), run(logits, bias)):
        assert torch.equal(got, expected)


def test_fake_tensors_have_the_results_shapes():
    torch.library.opcheck(torch.ops.dsa.moe_gate, (torch.randn(3, 8), torch.zeros(8), 2, "sigmoid", 1, 1, True, 1.0))
    torch.library.opcheck(torch.ops.dsa.sort_by_expert, (torch.tensor([[1, 0], [2, 2]]), 3))


@pytest.mark.parametrize(
    "experts, options, message",
    [
        (1056, {}, "logits: the kernel takes up to 1024 experts, got 1056"),
        (64, {"top_k": 33}, "top_k: the kernel takes up to 32, got 33"),
        (128, {"n_group": 64, "topk_group": 64}, "n_group: the kernel takes up to 32, got 64"),
    ],
)
def test_what_the_kernel_takes(monkeypatch, experts, options, message):
    monkeypatch.setattr(backends, "runs_kernel", lambda *asked: True)
    with pytest.raises(ValueError, match=message):
        dsa.moe_gate(torch.zeros(2, experts), torch.zeros(experts), **{"top_k": 2} | options)


@pytest.mark.parametrize(
    "entries, count, message",
    [
        (2**31 - 511, 8, "experts: the kernel takes up to 2147483136 entries, got shape [2147483137]"),
        (2, 2**31 - 1, "count: the kernel takes up to 2147483646 experts, got 2147483647"),
    ],
)
def test_what_the_sort_takes(monkeypatch, entries, count, message):
    monkeypatch.setattr(backends, "runs_kernel", lambda *asked: True)
    with pytest.raises(ValueError, match=re.escape(message)):
        dsa.sort_by_expert(torch.zeros(1, dtype=torch.int32).expand(entries), count)


def test_the_sorts_numbers_are_int32():
    """Of the most entries: the end of the last warp's part, and the last load of the last lane."""
    of_a_warp = math.ceil(MAX_SORT_ENTRIES / WARPS)
    each = math.ceil(of_a_warp / 32) * 32
    assert WARPS * each < 2**31 and MAX_SORT_ENTRIES + 32 * AHEAD < 2**31


def test_gradients_take_the_reference(monkeypatch):
    monkeypatch.setattr(backends, "runs_kernel", lambda *asked: True)
    logits = torch.zeros(2, 8, requires_grad=True)
    assert dsa.moe_gate(logits, torch.zeros(8), 2)[1].requires_grad
