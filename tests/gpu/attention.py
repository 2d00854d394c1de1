"""Helpers for tests of attention kernels and of other ops with index tensors."""

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
    """Return a maker of random CUDA tensors. The seed is the next number of torch's CPU generator, so two makers make
    different numbers."""
    return Maker("cuda", int(torch.randint(2**62, ())))


def checked(case: Case, given: Given, record_error: Any = None) -> list[torch.Tensor]:
    poison_free_memory(mebibytes=64)
    found = case.run(given)
    error = case.check(given, found)
    if record_error:
        record_error(error)
    return found


def replayed(call: Callable[[], Any], given: Given, renewals: Iterable[Given]) -> Iterator[Any]:
    """Capture the call, and replay it with the tensors of each renewal, copied into `given`. Yields the same result
    tensors after each replay."""
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
    """Return int32 [6]: indices next to [0, n) on both sides, and at the limits of int32."""
    return int32([-1, n, -(2**31), 2**31 - 1, n + 1, -2])


def spoiled(indices: torch.Tensor, n: int, fraction: float) -> torch.Tensor:
    bad = no_keys(n)[torch.randint(6, indices.shape, device="cuda")]
    return torch.where(torch.rand(indices.shape, device="cuda") < fraction, bad, indices)


def starts(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0).int()


def assert_writes_a_part(case: Case, given: Given) -> torch.Tensor:
    """Check calls whose `out` is a view of some adjacent heads of a larger tensor. Only these heads may be written.

    -> the larger tensor of the last call. All elements are NaN again.
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
