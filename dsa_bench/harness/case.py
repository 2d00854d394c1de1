"""A benchmark case: one shape of one op, ours and the peers' calls over the same inputs."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import dsa_bench
from dsa.testing import bench

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """name     the shape in words
    calls    "dsa" and peers -> calls over different inputs, which are rotated
    figure   milliseconds of ours -> the rate or bandwidth in words
    check    raises AssertionError if this result of ours on the first input is wrong; None: not checked
    graph    time CUDA graph replays, for calls below 100 us
    repeats  how often each is timed
    flops    peer -> FLOP of its call, if they are not those of ours: rates are then what to compare, and the table has
             the peer's
    """

    name: str
    calls: Mapping[str, Sequence[Call]]
    figure: Callable[[float], str]
    check: Callable[[Any], None] | None = None
    graph: bool = False
    repeats: int = 20
    flops: Mapping[str, float] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """{"shape", "ms", "figure", "peers": {name: {"ms", "ratio"}}, "peer", "peer_ms", "ratio"}: the last three are
        the best peer's; ratio = peer's ms / ours, so above 1 is faster than the peer in the same run. A peer of
        `flops` also has its "tflops", TFLOP/s."""
        times = bench(self.calls, repeats=self.repeats, graph=self.graph)
        ours = times.pop("dsa")
        best = min(times, key=times.get) if times else None
        peers: dict[str, dict[str, float]] = {}
        for name, ms in times.items():
            peers[name] = {"ms": round(ms, 5), "ratio": round(ms / ours, 3)}
            if name in self.flops:
                peers[name]["tflops"] = round(self.flops[name] / (ms * 1e-3) / 1e12, 1)
        return {
            "shape": self.name,
            "ms": round(ours, 5),
            "figure": self.figure(ours),
            "peers": peers,
            "peer": best,
            "peer_ms": peers[best]["ms"] if best else None,
            "ratio": peers[best]["ratio"] if best else None,
        }


def benchmarked_ops() -> list[str]:
    return sorted(m.name for m in pkgutil.iter_modules(dsa_bench.__path__) if not m.ispkg)


def load(op: str) -> ModuleType:
    """The benchmark module of an op, or a ValueError that lists them."""
    if op not in benchmarked_ops():
        raise ValueError(f"no benchmark for {op!r}; there are: {', '.join(benchmarked_ops())}")
    return importlib.import_module(f"dsa_bench.{op}")


def run(op: str) -> list[dict[str, Any]]:
    """The rows of all shapes of an op."""
    module = load(op)
    return [module.case(*shape).row() for shape in module.SHAPES]
