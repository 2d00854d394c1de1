"""Either all ranks sum and send rows through each other's memory, or none does, whatever one of them misses."""

import contextlib
import math
import os
import socket
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from dsa.parallel import one_shot_sum, peer_copies
from dsa.runtime import backends
from dsa_layers.generation.steps import CapturedStep
from tests.layers.parallel.processes import in_ranks

CPU = torch.device("cpu")


class Made:
    """Stands in for the sum or the copies, which need GPUs."""

    def __init__(self, group, memory):
        dist.barrier(group)  # ranks that share memory wait for each other here
        if memory.dtype == torch.uint8:
            self.right = memory.shape == (2, peer_copies.UNIT)
        else:  # zeroed before the ranks vote
            self.right = not memory.any() and memory.shape == (2, 2, one_shot_sum._places(2), 4)


def missing(*_, **options):
    raise RuntimeError("no peer access")


class Faulty(Made):
    def __init__(self, group, memory):
        super().__init__(group, memory)
        missing()


# {name: (its constructor, (the class's module, the class's name), how the warning starts)}
WAYS = {
    "sums": (one_shot_sum.one_shot_sum, (one_shot_sum, "OneShotSum"), "sums go"),
    "copies": (peer_copies.peer_copies, (peer_copies, "PeerCopies"), "rows go"),
}

# Patches on the second rank.
FAULTS = {
    "nothing": [],
    "no kernels": [(backends, "why_no_kernels", lambda: "no DSL")],
    "no memory": [(_symmetric_memory, "empty", missing)],
    "no access": [],  # its class is Faulty
    "another machine": [(socket, "gethostname", lambda: "another")],
}


def without_multicast(shape, dtype, device):
    """Stands in for torch's allocation, which reads this setting."""
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    return torch.full(shape, 7, dtype=dtype, device=device)


def outcome(ranks, way, fault):
    """(whether what was made is right, or None; the warnings)"""
    make, place, what = WAYS[way]
    patches = [
        (dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl"),
        (backends, "why_no_kernels", lambda: None),
        (_symmetric_memory, "empty", without_multicast),
        (*place, Faulty if fault == "no access" and ranks.rank == 1 else Made),
        *(FAULTS[fault] if ranks.rank == 1 else []),
    ]
    group = dist.new_group([0, 1])  # ranks ask each other once per group
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(mock.patch.object(*patch))
        caught = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        found = [make(group, CPU) for _ in range(2)]
    assert found[0] is found[1]
    told = [str(warning.message) for warning in caught if str(warning.message).startswith(what)]
    return found[0] and found[0].right, told


def outcomes(ranks):
    assert one_shot_sum.one_shot_sum(dist.group.WORLD, CPU) is None  # without NCCL
    return {(way, fault): outcome(ranks, way, fault) for way in WAYS for fault in FAULTS}


def test_all_ranks_share_memory_or_none_does():
    first, second = in_ranks(2, outcomes)
    for (way, fault), (mine, warned) in first.items():
        theirs, others = second[way, fault]
        if fault == "nothing" or (way, fault) == ("copies", "no kernels"):  # copies need no kernels
            assert mine is theirs is True and not warned and not others
            continue
        assert mine is theirs is None, (way, fault)
        if fault == "another machine":  # which is no fault
            assert not warned and not others
            continue
        told = f"{WAYS[way][2]} through NCCL, not through symmetric memory: another rank has none"
        assert warned == [told] and len(others) == 1 and others != warned, (way, fault)


class OnGPU(SimpleNamespace):
    """What `takes` and `takes_experts` read of a tensor on a GPU. shape: [12, 64] by default."""

    def __init__(self, *, shape=(12, 64), dtype=torch.bfloat16, address=256, stride=(64, 1), is_cuda=True):
        nbytes = math.prod(shape) * dtype.itemsize
        super().__init__(shape=shape, dtype=dtype, itemsize=dtype.itemsize, is_cuda=is_cuda, nbytes=nbytes)
        self.stride, self.data_ptr = stride.__getitem__, lambda: address

    def __len__(self):
        return self.shape[0]


def test_only_parts_that_the_kernel_takes_are_summed():
    takes = one_shot_sum.takes
    assert takes(OnGPU(), 2) and takes(OnGPU(shape=(1, 4), dtype=torch.float32), 8)
    for ranks in (2, 4, 8):
        most = one_shot_sum.most_bytes(ranks) // 2
        assert takes(OnGPU(shape=(1, most)), ranks) and not takes(OnGPU(shape=(1, most + 8)), ranks)
    for wrong in ({"shape": (0, 64)}, {"shape": (1, 4)}, {"dtype": torch.float16}, {"address": 8}, {"is_cuda": False}):
        assert not takes(OnGPU(**wrong), 2), wrong
    assert not takes(OnGPU(), 1) and not takes(OnGPU(), 9)
    with backends.use_backend("reference"):
        assert not takes(OnGPU(), 2)


def test_only_experts_that_the_kernel_takes_are_summed_in_it(monkeypatch):
    monkeypatch.setattr(backends, "allows_kernels", lambda: True)

    def taken(tokens=2, index=torch.int32, weights=True, shared=None, ranks=2, **options):
        rows, weights = torch.zeros(tokens, 6, dtype=index), torch.ones(tokens, 6) if weights else None
        shared = None if shared is None else OnGPU(shape=(shared, 64))
        return one_shot_sum.takes_experts(OnGPU(**options), rows, weights, shared, ranks)

    few = one_shot_sum.FEW // 128
    others = [{"index": torch.int64}, {"weights": False}, {"shape": (0, 64)}, {"dtype": torch.float16}]
    others += [{"is_cuda": False}, {"address": 8}, {"stride": (60, 1)}, {"stride": (64, 2)}, {"shape": (12, 60)}]
    others += [{"tokens": 0}, {"tokens": few + 1}, {"ranks": 9}, {"shared": 3}]
    with torch.no_grad():
        assert taken() and taken(shared=2) and taken(dtype=torch.float32) and taken(ranks=8) and taken(tokens=few)
        assert not any(taken(**options) for options in others)
    assert not taken()  # with gradients


def test_a_sum_after_a_lost_rank_raises(monkeypatch):
    """So does the replay of a graph, which calls no sum. Nothing is launched."""
    one_shot_sum.check_ranks()
    monkeypatch.setattr(one_shot_sum, "_lost", lambda: torch.tensor([3], dtype=torch.int32))
    own, step = object.__new__(one_shot_sum.OneShotSum), CapturedStep(CPU, captures=True)
    step.captures, step._graphs = True, {(1, 1): (None, mock.Mock(spec=[]), None)}
    for call in (lambda: own._sum(mock.Mock(spec=[]), (), torch.ones(4)), lambda: step._step(1, 1, None)):
        with pytest.raises(RuntimeError, match="rank 2 sent nothing for about a minute"):
            call()
