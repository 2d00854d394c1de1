"""Host time per call of each op and of its peers: Python, checks, allocations and launches.

The GPU works asynchronously: within a block of calls the host does not wait for it. The inputs have the first shape of
the benchmark's PROBED, which is small, or else of SHAPES. Times differ between hosts by a factor of two and more. So
the first row is a call of a PyTorch function, by which machines can be compared.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dsa.ops import op_modules
from dsa_bench.harness.benchmarks import benchmarks
from dsa_bench.harness.calls import Call, free
from dsa_bench.harness.case import OURS, Case, load, microseconds, row

CALLS, BLOCKS = 40, 15  # number of calls per block, number of timed blocks


def ops() -> list[str]:
    """Return the benchmarks that are named after one op, also with a suffix such as `_sparse`."""
    return [name for name in benchmarks() if any(f"{name}_".startswith(f"{op}_") for op in op_modules())]


def rows(names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield a row per benchmark in `names`. By default, yield a row of PyTorch's addition and then a row per benchmark
    of `ops`.

    The fields are those of `case.row`, with the host's milliseconds.
    """
    if not names:
        x = torch.zeros(8, device="cuda" if torch.cuda.is_available() else "cpu")
        yield row("torch.add, 8 numbers", host_ms({OURS: partial(torch.add, x, x)}), microseconds)
    for name in names or ops():
        module = load(name)
        torch.manual_seed(0)
        yield _row(name, module.case(*getattr(module, "PROBED", module.SHAPES)[0]))
        free()


def _row(name: str, case: Case) -> dict[str, Any]:
    failed = case.tried()
    left_out = {*case.baselines, *case.yardsticks, *failed}
    calls = {who: each[0] for who, each in case.calls.items() if who not in left_out}
    return row(f"{name}, {case.name}", host_ms(calls), microseconds, failed)


def host_ms(calls: Mapping[str, Call]) -> dict[str, float]:
    """Return {name: median host milliseconds per call}. The names take turns, a block of CALLS calls at a time. Each
    name's first block is not counted."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(BLOCKS + 1):
        for name, call in calls.items():
            found[name].append(_block(call, wait))
    return {name: statistics.median(ms[1:]) for name, ms in found.items()}


def _block(call: Call, wait: Callable[[], None]) -> float:
    wait()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    ms = (time.perf_counter() - started) / CALLS * 1e3
    wait()
    return ms
