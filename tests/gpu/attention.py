"""Helpers for tests of attention kernels and of other ops with index tensors. They check a call, replay a captured call
with new data, make invalid indices, and check results that are written into a part of a larger tensor."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from dsa.cases import CASES
from dsa.cases.case import Case, Given, Maker
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_same_bits, captured

D_V = 512
INF, NAN = math.inf, math.nan
BF16, FP16 = torch.bfloat16, torch.float16
KINDS = [(576, BF16), (576, FP16), (512, BF16), (512, FP16)]
SINKS = [-INF, INF, 0.0, 5.0, 6.0, 7.0, -1e30, 1e30]


def case_of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def maker() -> Maker:
    """Return a maker of random CUDA tensors. The maker's seed is the next number of torch's CPU generator, so the
    makers of different calls make different numbers."""
    return Maker("cuda", int(torch.randint(2**62, ())))


def checked(case: Case, given: Given, record_error: Any = None) -> list[torch.Tensor]:
    """Fill free GPU memory with NaN, run the case's op, check the results with `case.check`, and return them."""
    poison_free_memory(mebibytes=64)
    found = case.run(given)
    error = case.check(given, found)
    if record_error:
        record_error(error)
    return found


def replayed(call: Callable[[], Any], given: Given, renewals: Iterable[Given]) -> Iterator[Any]:
    """Capture the call, replay it once for each of `renewals`, and yield the results after each replay. They are the
    same tensors each time. Before a replay the tensors of the renewal are copied to the tensors of `given`, which the
    call reads."""
    graph, found = captured(call)
    for new in renewals:
        for name, x in given.items():
            if isinstance(x, torch.Tensor):
                x.copy_(new[name])
        graph.replay()
        torch.cuda.synchronize()
        yield found


def int32(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32, device="cuda")


def no_keys(n: int) -> torch.Tensor:
    """Return int32 [6]: indices outside [0, n), on both sides. They are next to the range or at the limits of int32."""
    return int32([-1, n, -(2**31), 2**31 - 1, n + 1, -2])


def spoiled(indices: torch.Tensor, n: int, fraction: float) -> torch.Tensor:
    """Return the indices, each replaced with probability `fraction` by an index outside [0, n)."""
    bad = no_keys(n)[torch.randint(6, indices.shape, device="cuda")]
    return torch.where(torch.rand(indices.shape, device="cuda") < fraction, bad, indices)


def starts(lengths: list[int]) -> torch.Tensor:
    """Return int32 boundaries of packed sequences: 0, followed by the running sums of `lengths`."""
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def assert_writes_a_part(case: Case, given: Given) -> torch.Tensor:
    """Check three calls with `out`. Each `out` is a view of some adjacent heads of a larger tensor; in the first call
    these are all heads of the tensor. The results must have the bits of a call without `out`, and the other heads of
    the tensor must not be written.

    -> the larger tensor of the last call, with three more heads than `out`. All elements are NaN again.
    """
    expected = case.run(given)
    *rows, heads, channels = expected[0].shape
    for around in (0, 64 - heads % 64, 3):
        whole = torch.full((*rows, heads + around, channels), NAN, dtype=expected[0].dtype, device="cuda")
        out = whole.narrow(-2, around // 2, heads)
        got = case.run(given | {"out": out})
        assert got[0] is out
        assert_same_bits(got, expected)
        out.fill_(NAN)
        assert whole.isnan().all()
    return whole
