"""The lists of windows beside the same by plain torch operations: bytes written a second."""

from collections.abc import Callable
from functools import cache, partial

import torch

import dsa
from dsa.reference.mla import window_indices as reference
from dsa.testing import copy_bandwidth
from dsa_bench.harness.case import Call, Case

# what; queries of a prefill chunk in 16 sequences, or sequences of a decode batch
SHAPES = [("indices", 16384), ("indices", 4096), ("pages", 1024), ("pages", 64), ("rings", 64)]
WINDOW, PAGE, MAX_PAGES, SEQUENCES = 128, 64, 512, 16
_FRESH = 16  # inputs in a graph
_ceiling = cache(copy_bandwidth)


def _arguments(what: str, count: int) -> tuple:
    if what == "indices":
        ends = torch.linspace(0, count, SEQUENCES + 1, device="cuda").int()
        return ends, ends * 2, count, WINDOW
    lengths = torch.randint(0, PAGE * MAX_PAGES, (count,), dtype=torch.int32, device="cuda")
    if what == "rings":
        return None, lengths, 1, WINDOW, WINDOW
    table = torch.randint(0, 65536, (count, MAX_PAGES), dtype=torch.int32, device="cuda")
    return table, lengths, 1, PAGE, WINDOW


def case(what: str, count: int) -> Case:
    name = "window_indices" if what == "indices" else "window_slots"
    inputs = [_arguments(what, count) for _ in range(_FRESH)]
    functions: dict[str, Callable[..., torch.Tensor]] = {"dsa": getattr(dsa, name), "torch": getattr(reference, name)}
    calls: dict[str, list[Call]] = {who: [partial(f, *i) for i in inputs] for who, f in functions.items()}

    def figure(ms: float) -> str:
        rate = 4 * count * WINDOW / (ms * 1e-3)
        return f"{ms * 1e3:.1f} us, {rate / 1e9:.0f} GB/s, {rate / _ceiling():.0%} of copy"

    def check(got: torch.Tensor) -> None:
        if not torch.equal(got, functions["torch"](*inputs[0])):
            raise AssertionError("not the reference's list")

    baselines = frozenset({"torch"})
    return Case(f"{what} of {count}, window {WINDOW}", calls, figure, check, graph=True, baselines=baselines)
