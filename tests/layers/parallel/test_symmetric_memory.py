"""Whether ranks sum and send rows through each other's memory: all of them or none, whatever one of them misses."""

import contextlib
import os
import socket
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from dsa.runtime import backends
from dsa_layers.generation.steps import CapturedStep
from dsa_layers.parallel import one_shot_sum, peer_copies
from tests.layers.parallel.processes import in_ranks

CPU = torch.device("cpu")


class Made:
    """In the place of the sum itself, or of copies, which need GPUs."""

    def __init__(self, group, memory):
        dist.barrier(group)  # as ranks meet that share memory: the others must not wait for one that does not come
        if memory.dtype == torch.uint8:
            self.right = memory.shape == (2, peer_copies.UNIT)
        else:  # nothing of an earlier use is there when the ranks have voted
            self.right = not memory.any() and memory.shape == (2, 2, one_shot_sum._places(2), 4)


def missing(*_):
    raise RuntimeError("no peer access")


class Faulty(Made):
    def __init__(self, group, memory):
        super().__init__(group, memory)
        missing()


# {what is made: (what makes it, where its class is, what there is to say)}
WAYS = {
    "sums": (one_shot_sum.one_shot_sum, (one_shot_sum, "OneShotSum"), "sums go"),
    "copies": (peer_copies.peer_copies, (peer_copies, "PeerCopies"), "rows go"),
}

# What is otherwise on the second rank.
FAULTS = {
    "nothing": [],
    "no kernels": [(backends, "why_no_kernels", lambda: "no DSL")],
    "no memory": [(_symmetric_memory, "empty", lambda *_, **options: missing())],
    "no access": [],  # the class of the way is faulty
    "another machine": [(socket, "gethostname", lambda: "another")],
}


def without_multicast(shape, dtype, device):
    """What torch gives, which reads this setting when it allocates."""
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    return torch.full(shape, 7, dtype=dtype, device=device)


def outcome(ranks, way, fault):
    """(what there is, the warnings)"""
    make, place, what = WAYS[way]
    faulty = fault == "no access" and ranks.rank == 1
    patches = [
        (dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl"),
        (backends, "why_no_kernels", lambda: None),
        (_symmetric_memory, "empty", without_multicast),
        (*place, Faulty if faulty else Made),
        *(FAULTS[fault] if ranks.rank == 1 else []),
    ]
    group = dist.new_group([0, 1])  # ranks ask each other once for each group
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


@pytest.fixture(scope="module")
def of_ranks():
    """All cases in the same processes, which are slow to start."""
    return in_ranks(2, outcomes)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_all_ranks_or_none(of_ranks, way, fault):
    (first, told_first), (second, told_second) = (found[way, fault] for found in of_ranks)
    if fault == "nothing" or (way, fault) == ("copies", "no kernels"):  # copies need none
        assert first is second is True and not told_first and not told_second
        return
    assert first is second is None
    if fault == "another machine":  # that is no fault
        assert not told_first and not told_second
        return
    told = f"{WAYS[way][2]} through NCCL, not through symmetric memory: another rank has none"
    assert told_first == [told] and len(told_second) == 1 and told_second != told_first


def part(nbytes=4096, dtype=torch.bfloat16, address=256, is_cuda=True):
    return SimpleNamespace(nbytes=nbytes, dtype=dtype, is_cuda=is_cuda, data_ptr=lambda: address)


def test_what_is_summed():
    """Parts that fit the memory, in whole and aligned 16 bytes, of a dtype and a number of ranks of the kernel's."""
    takes = one_shot_sum.takes
    assert takes(part(), 2) and takes(part(16, torch.float32), 8)
    for ranks in (2, 4, 8):
        most = one_shot_sum.most_bytes(ranks)
        assert takes(part(most), ranks) and not takes(part(most + 16), ranks)
    others = {"nbytes": (0, 8, 4100), "dtype": (torch.float16, torch.float64), "address": (8,), "is_cuda": (False,)}
    assert not any(takes(part(**{name: value}), 2) for name, values in others.items() for value in values)
    assert not takes(part(), 1) and not takes(part(), 9)
    with backends.use_backend("reference"):
        assert not takes(part(), 2)


def test_which_experts_are_summed_in_one_kernel(monkeypatch):
    """Of few tokens, in inference, whose rows have weights and lie at multiples of 16 bytes."""
    monkeypatch.setattr(backends, "allows_kernels", lambda: True)

    class Outputs:
        def __init__(self, *, shape=(12, 64), dtype=torch.bfloat16, address=0, stride=(64, 1), is_cuda=True):
            self.shape, self.dtype, self.itemsize, self.is_cuda = shape, dtype, dtype.itemsize, is_cuda
            self.stride, self.data_ptr = stride.__getitem__, lambda: address

        def __len__(self):
            return self.shape[0]

    def taken(tokens=2, index=torch.int32, weights=True, shared=False, ranks=2, **options):
        rows = torch.zeros(tokens, 6, dtype=index)
        of_shared = Outputs(shape=(tokens + (shared == "longer"), 64))
        of = (Outputs(**options), rows, torch.ones(tokens, 6) if weights else None, of_shared if shared else None)
        return one_shot_sum.takes_experts(*of, ranks)

    with torch.no_grad():
        assert taken() and taken(shared=True) and taken(dtype=torch.float32) and taken(ranks=8)
        assert taken(tokens=one_shot_sum.FEW // 128) and not taken(tokens=one_shot_sum.FEW // 128 + 1)
        others = {"index": torch.int64, "weights": False, "shape": (0, 64), "dtype": torch.float16, "is_cuda": False}
        others |= {"address": 8, "stride": (60, 1), "tokens": 0, "ranks": 9}
        for name, value in others.items():
            assert not taken(**{name: value}), name
        assert not taken(stride=(64, 2)) and not taken(shape=(12, 60)) and not taken(shared="longer")
    assert not taken()  # with gradients


def test_a_sum_after_a_lost_rank_raises(monkeypatch):
    """So does the replay of a graph, which calls no sum; and nothing is launched."""
    one_shot_sum.check_ranks()
    monkeypatch.setattr(one_shot_sum, "_lost", lambda: torch.tensor([3], dtype=torch.int32))
    own, step = object.__new__(one_shot_sum.OneShotSum), CapturedStep(CPU, captures=True, graphs=1)
    step.captures, step._graphs = True, {(1, 1): (None, mock.Mock(spec=[]), None)}
    for call in (lambda: own._sum(mock.Mock(spec=[]), (), torch.ones(4)), lambda: step._step(1, 1, None)):
        with pytest.raises(RuntimeError, match="rank 2 sent nothing for about a minute"):
            call()
