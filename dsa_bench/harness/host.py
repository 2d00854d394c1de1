"""What a call of each op takes of the host, beside the peers' calls: Python, checks, allocations and launches.

The GPU works behind the host meanwhile: nothing waits for it within a block of calls. The inputs are those of an op's
benchmark, small ones where it has some for peers. Hosts differ by a factor of two and more: the first row is a call of
PyTorch's own, by which the others can be compared between machines.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from dsa.ops import op_modules
from dsa_bench.harness.benchmarks import benchmarks
from dsa_bench.harness.calls import Call
from dsa_bench.harness.case import OURS, Case, load

CALLS, BLOCKS = 40, 15  # calls between two waits for the GPU, and how often that is timed


def ops() -> list[str]:
    """The benchmarks of an op, or of a part of one."""
    return [name for name in benchmarks() if any(f"{name}_".startswith(f"{op}_") for op in op_modules())]


def rows(names: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """A row for each op, of these or of all, with the fields of `Case.row`; "ms" are the host's, and peers alone stand
    beside ours. Of all, PyTorch's addition comes first."""
    if not names:
        x = torch.zeros(8, device="cuda" if torch.cuda.is_available() else "cpu")
        yield _row_of("torch.add, 8 numbers", host_ms({OURS: partial(torch.add, x, x)}))
    for name in names or ops():
        module = load(name)
        torch.manual_seed(0)
        yield _row(name, module.case(*getattr(module, "PROBED", module.SHAPES)[0]))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _row(name: str, case: Case) -> dict[str, Any]:
    failed = case.tried()
    calls = {who: own[0] for who, own in case.calls.items() if who not in _others(case) | failed.keys()}
    return _row_of(f"{name}, {case.name}", host_ms(calls)) | {"failed": failed}


def _row_of(shape: str, times: dict[str, float]) -> dict[str, Any]:
    """times: milliseconds of ours and of the peers."""
    ours = round(times.pop(OURS), 5)
    row = {"shape": shape, "ms": ours, "figure": f"{ours * 1e3:.1f} us"}
    row["peers"] = {who: {"ms": round(ms, 5), "ratio": round(ms / ours, 3)} for who, ms in times.items()}
    best = min(times, key=times.__getitem__, default=None)
    row |= {"peer": best, "peer_ms": None, "ratio": None, "baselines": {}, "yardsticks": {}, "failed": {}}
    if best is not None:
        row |= {"peer_ms": row["peers"][best]["ms"], "ratio": row["peers"][best]["ratio"]}
    return row | dict.fromkeys(("baseline", "baseline_ms", "baseline_ratio"))


def _others(case: Case) -> frozenset[str]:
    """What is no peer."""
    return case.baselines | case.yardsticks


def host_ms(calls: Mapping[str, Call]) -> dict[str, float]:
    """Median milliseconds of the host a call; the implementations take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    wait = torch.cuda.synchronize if torch.cuda.is_available() else _nothing
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


def _nothing() -> None:
    """On a CPU there is nothing to wait for."""
