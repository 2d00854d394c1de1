"""The bridges of the gate and of the sort by expert: the reference on a CPU, torch.compile, and what kernels take."""

import math
import re

import pytest
import torch

import dsa
from dsa import backends
from dsa.kernels.moe.limits import MAX_SORT_ENTRIES
from dsa.kernels.moe.sort_by_expert_sm90 import AHEAD, WARPS


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
