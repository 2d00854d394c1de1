"""A benchmark case: one shape of one op, ours and the peers' calls over the same inputs."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from dsa.testing import bench
from dsa_bench.harness.agreement import agree
from dsa_bench.harness.benchmarks import benchmarks
from dsa_bench.harness.calls import Call, reason

OURS = "dsa"


@dataclass(frozen=True)
class Case:
    """name       the shape in words
    calls      "dsa" and others -> calls over different inputs, which are rotated
    figure     milliseconds of ours -> the rate or bandwidth in words
    check      raises AssertionError if this result of ours on the first input is wrong; None: not checked
    graph      time CUDA graph replays, for calls below 100 us
    repeats    how often each is timed
    baselines  of the others, the same function in plain PyTorch, which may end in ops of ours: a cast, a rotation, a
               sort, a write; the rest are peers: other libraries' kernels for the same function, some with our cast
    yardsticks of the others, what is not compared with ours: what to expect at best, or another way to the same end,
               such as kernels of ours one after the other
    flops      name -> FLOP of its call, if they are not those of ours: rates are then what to compare, and its own is
               in the table
    failed     peers that are installed and have no call -> why
    agree      raises AssertionError if the result of a peer or a baseline on the first input, the first argument, is
               not ours, the second
    reference  whether ours on the first input can be called with the backend "reference" too
    """

    name: str
    calls: Mapping[str, Sequence[Call]]
    figure: Callable[[float], str]
    check: Callable[[Any], None] | None = None
    graph: bool = False
    repeats: int = 20
    baselines: frozenset[str] = frozenset()
    yardsticks: frozenset[str] = frozenset()
    flops: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    agree: Callable[[Any, Any], None] = agree
    reference: bool = True

    def row(self) -> dict[str, Any]:
        """{"shape", "ms", "figure", "peers", "peer", "peer_ms", "ratio", "baselines", "baseline", "baseline_ms",
        "baseline_ratio", "yardsticks", "failed"}.

        peers, baselines, yardsticks: {name: {"ms", "ratio"}}, ratio = its ms / ours, so above 1 ours is faster in the
        same run; one of `flops` also has its "tflops", TFLOP/s. peer, peer_ms, ratio: of the fastest peer, or None;
        baseline, baseline_ms, baseline_ratio: of the fastest baseline. failed: {name: why it was not timed}, which
        holds every peer that is installed and takes the shape, and every baseline, that raises or computes something
        else.
        """
        failed = self.tried()
        calls = {name: calls for name, calls in self.calls.items() if name not in failed}
        times = bench(calls, repeats=self.repeats, graph=self.graph)
        ours = times.pop(OURS)
        kinds: dict[str, dict[str, dict[str, float]]] = {"peers": {}, "baselines": {}, "yardsticks": {}}
        for name, ms in times.items():
            kind = "baselines" if name in self.baselines else "yardsticks" if name in self.yardsticks else "peers"
            kinds[kind][name] = {"ms": round(ms, 5), "ratio": round(ms / ours, 3)}
            if name in self.flops:
                kinds[kind][name]["tflops"] = round(self.flops[name] / (ms * 1e-3) / 1e12, 1)
        row = {"shape": self.name, "ms": round(ours, 5), "figure": self.figure(ours), **kinds, "failed": failed}
        peer, peer_ms, ratio = _fastest(kinds["peers"])
        baseline, baseline_ms, baseline_ratio = _fastest(kinds["baselines"])
        row |= {"peer": peer, "peer_ms": peer_ms, "ratio": ratio}
        return row | {"baseline": baseline, "baseline_ms": baseline_ms, "baseline_ratio": baseline_ratio}

    def tried(self, expected: object = None) -> dict[str, str]:
        """{name: why not} of all that cannot stand beside ours: `failed`, what raises, also as a graph if graphs are
        timed, and peers and baselines whose result is not `expected`, by default ours."""
        why = dict(self.failed)
        for name in self.calls:
            if name == OURS or name in self.yardsticks:
                continue
            try:
                got = _made(self.calls[name], self.graph)
            except Exception as error:  # a peer may say no in any way, and must not end the others' run
                why[name] = f"failed: {reason(error)}"
                continue
            if expected is None:
                expected = self.calls[OURS][0]()
            try:
                self.agree(got, expected)
            except AssertionError as error:
                why[name] = reason(error)
            del got  # before the next result needs memory
        return why


def _made(calls: Sequence[Call], graph: bool) -> object:
    """The first call's result. Makes all of them, and captures the first if graphs are timed."""
    result = calls[0]()
    for call in calls[1:]:
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        if graph:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                calls[0]()
    return result


def _fastest(others: Mapping[str, Mapping[str, float]]) -> tuple[str | None, float | None, float | None]:
    """(name, ms, ratio) of the fastest, or None."""
    if not others:
        return None, None, None
    name = min(others, key=lambda name: others[name]["ms"])
    return name, others[name]["ms"], others[name]["ratio"]


def load(op: str) -> ModuleType:
    """The benchmark module of an op, or a ValueError that lists them."""
    if op not in benchmarks():
        raise ValueError(f"no benchmark for {op!r}; there are: {', '.join(benchmarks())}")
    return importlib.import_module(benchmarks()[op])


def run(op: str) -> list[dict[str, Any]]:
    """The rows of all shapes of an op."""
    module = load(op)
    if hasattr(module, "prepare"):
        module.prepare()
    return [module.case(*shape).row() for shape in module.SHAPES]
