"""A benchmark case: our calls of one op at one shape, and the peers' calls over the same inputs.

Benchmark modules import all their helpers from here, including random inputs (`inputs`) and comparisons (`agreement`).
`fresh` makes several inputs, which calls read in turn, so that a call does not find its input in the L2 cache. `over`
makes the calls over the inputs. `bytes_rate` returns the `Figure` of a memory-bound case, and `flop_rate` that of a
compute-bound case.
"""

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

import torch

from dsa.testing import bench, bf16_gemm_rate, copy_bandwidth, fp8_gemm_rate
from dsa_bench.harness.agreement import (
    RECALL,
    agree,
    agree_attention,
    agree_selected,
    as_reference,
    close,
    first,
    some,
)
from dsa_bench.harness.benchmarks import benchmarks
from dsa_bench.harness.calls import Call, Peers, into, over, reason
from dsa_bench.harness.inputs import (
    Scaled,
    activations,
    angles,
    bf16,
    causal_ranges,
    e4m3,
    f32,
    scales,
    selected_keys,
    weights,
)

__all__ = [
    "OURS",
    "RECALL",
    "Call",
    "Case",
    "Figure",
    "Input",
    "Peers",
    "Scaled",
    "activations",
    "agree",
    "agree_attention",
    "agree_selected",
    "angles",
    "as_reference",
    "benchmarks",
    "bf16",
    "bf16_gemm",
    "bytes_case",
    "bytes_rate",
    "causal_ranges",
    "close",
    "copies",
    "copy",
    "e4m3",
    "f32",
    "first",
    "flop_rate",
    "fp8_gemm",
    "fresh",
    "fresh_calls",
    "fresh_matrices",
    "into",
    "load",
    "microseconds",
    "nearer_rate",
    "over",
    "plain_rate",
    "row",
    "run",
    "scales",
    "selected_keys",
    "some",
    "weights",
]
OURS = "dsa"
Figure = Callable[[float], str]  # milliseconds -> text
Input = TypeVar("Input")
# The ceilings of the figures: bytes per second of a copy, FLOP per second of bf16 and of FP8 GEMM. Each is measured
# once per process, at its first call.
copy, bf16_gemm, fp8_gemm = cache(copy_bandwidth), cache(bf16_gemm_rate), cache(fp8_gemm_rate)


def copies(size: float, least: int = 2, most: int = 64, total: float = 400e6) -> int:
    """Return the number of inputs that a case's calls, or a graph's calls, read in turn. size: bytes of an input.

    The inputs together have about `total` bytes, so that no call finds its input in the L2 cache. But `most` small
    inputs can fit into the cache.
    """
    return min(most, max(least, int(total / size)))


def fresh(size: float, make: Callable[[], Input], **bounds: float) -> list[Input]:
    """Make as many inputs as `copies` returns. bounds: least, most and total of `copies`."""
    return [make() for _ in range(copies(size, **bounds))]


def fresh_calls(size: float, make: Callable[[], dict[str, Call]], **bounds: float) -> dict[str, list[Call]]:
    """Return {name: calls}. Each `make()` makes a new input and returns {name: a call over this input}."""
    made = fresh(size, make, **bounds)
    return {name: [calls[name] for calls in made] for name in made[0]}


def fresh_matrices(rows: int, columns: int) -> list[tuple[torch.Tensor]]:
    """Return [(matrix,), ...], the arguments of one call each. The bf16 matrices together have 200 MB, more than the L2
    cache."""
    return [(bf16(rows, columns) / 40,) for _ in range(int(200e6 / (2 * rows * columns)))]


def bytes_rate(size: float, us: bool = True) -> Figure:
    """Return a `Figure`: GB/s and their share of the copy bandwidth. size: bytes that a call reads and writes. us: the
    text begins with the microseconds."""

    def figure(ms: float) -> str:
        rate = size / (ms * 1e-3)
        return f"{microseconds(ms) + ', ' if us else ''}{rate / 1e9:.0f} GB/s, {rate / copy():.0%} of copy"

    return figure


def flop_rate(flops: float, ceiling: Callable[[], float]) -> Figure:
    """Return a `Figure`: TFLOP/s and their share of the ceiling, `bf16_gemm` or `fp8_gemm`. flops: FLOP of a call."""
    name = "bf16" if ceiling is bf16_gemm else "FP8"

    def figure(ms: float) -> str:
        rate = flops / (ms * 1e-3)
        return f"{rate / 1e12:.0f} TFLOP/s, {rate / ceiling():.0%} of {name} GEMM"

    return figure


def nearer_rate(size: float, flops: float) -> Figure:
    """Return the `Figure` that is nearer the ceiling: `bytes_rate`, or `flop_rate` with `bf16_gemm`."""

    def figure(ms: float) -> str:
        compute_bound = flops / bf16_gemm() > size / copy()
        return (flop_rate(flops, bf16_gemm) if compute_bound else bytes_rate(size, us=False))(ms)

    return figure


def plain_rate(size: float, flops: float = 0, of: str = "") -> Figure:
    """Return a `Figure` without shares of a ceiling: microseconds and GB/s, followed by the text `of`. With `flops`:
    microseconds, TFLOP/s and TB/s."""

    def figure(ms: float) -> str:
        seconds = ms * 1e-3
        if flops:
            rates = f"{flops / seconds / 1e12:.0f} TFLOP/s, {size / seconds / 1e12:.2f} TB/s"
        else:
            rates = f"{size / seconds / 1e9:.0f} GB/s{of}"
        return f"{microseconds(ms)}, {rates}"

    return figure


def microseconds(ms: float) -> str:
    return f"{ms * 1e3:.1f} us"


@dataclass
class Case:
    """One shape: the calls to time, how to compare their results, and how to print our time.

    name       the shape as text
    calls      {"dsa" or another name: calls over different inputs, which run in turn}. The calls of `peers` are added
    figure     our milliseconds -> the rate or bandwidth as text
    peers      other libraries' kernels for the same function, some followed by our cast
    graph      whether CUDA graph replays are timed, for calls below 100 us
    repeats    how often each entry of `calls` is timed
    baselines  names of calls of the same function in plain PyTorch, some with our ops for a part
    yardsticks names of calls whose times are shown for scale. Their results are not compared with ours
    flops      {name: FLOP of a call} of yardsticks whose FLOP differ from ours; the table then shows their rate
    agree      agree(theirs, ours) raises AssertionError if a peer's or baseline's first result differs from ours
    reference  whether the backend "reference" can run our first call; else `peers.probe` compares with our result
    check      check(ours) raises AssertionError if our first result is wrong; for the tuner
    """

    name: str
    calls: Mapping[str, Sequence[Call]]
    figure: Figure
    peers: Peers = field(default_factory=Peers)
    graph: bool = False
    repeats: int = 20
    baselines: Collection[str] = frozenset()
    yardsticks: Collection[str] = frozenset()
    flops: Mapping[str, float] = field(default_factory=dict)
    agree: Callable[[Any, Any], None] = agree
    reference: bool = True
    check: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        self.calls = {**self.calls, **self.peers.calls}

    def row(self) -> dict[str, Any]:
        failed = self.tried()
        calls = {name: calls for name, calls in self.calls.items() if name not in failed}
        times = bench(calls, repeats=self.repeats, graph=self.graph)
        kinds = {"baselines": self.baselines, "yardsticks": self.yardsticks}
        return row(self.name, times, self.figure, failed, kinds, self.flops)

    def tried(self, expected: object = None) -> dict[str, str]:
        """Return {name: reason} of the peers and baselines that `row` does not time.

        These are peers without a call, and peers and baselines whose call raises or whose result differs from
        `expected`. By default `expected` is our result. If graphs are timed, a failed graph capture counts as well.
        """
        why = dict(self.peers.failed)
        for name in self.calls:
            if name == OURS or name in self.yardsticks:
                continue
            try:
                got = _made(self.calls[name], self.graph)
            except Exception as error:  # a peer may raise anything, and must not end the run of the others
                why[name] = f"failed: {reason(error)}"
                continue
            if expected is None:
                expected = self.calls[OURS][0]()
            try:
                self.agree(got, expected)
            except AssertionError as error:
                why[name] = reason(error)
            del got  # frees memory for the next result
        return why


def bytes_case(
    name: str,
    size: float,
    make: Callable[[], tuple],
    functions: Mapping[str, Callable[..., object]],
    peers: Callable[[list[tuple]], Peers] | None = None,
    most: int = 64,
    **options: Any,
) -> Case:
    """Return a memory-bound case: functions over the same fresh inputs, timed as CUDA graphs.

    size: bytes that a call moves. make: makes an input. peers: inputs -> the peers' calls over them. most: the largest
    number of inputs. options: further fields of the case.
    """
    inputs = fresh(size, make, most=most)
    found = peers(inputs) if peers else Peers()
    return Case(name, over(inputs, functions), bytes_rate(size), found, graph=True, **options)


def _made(calls: Sequence[Call], graph: bool) -> object:
    """Run all calls and, if graphs are timed, capture the first. Return the first call's result."""
    result = calls[0]()
    for call in calls[1:]:
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        if graph:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                calls[0]()
    return result


def row(
    shape: str,
    times: Mapping[str, float],
    figure: Figure,
    failed: Mapping[str, str] = MappingProxyType({}),
    kinds: Mapping[str, Collection[str]] = MappingProxyType({}),
    flops: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return {"shape", "ms", "figure", "peers", "peer", "peer_ms", "ratio", "baselines", "baseline", "baseline_ms",
    "baseline_ratio", "yardsticks", "failed"} from times, {name: milliseconds}.

    kinds: {"baselines" or "yardsticks": names}; all other names except ours are peers. peers, baselines, yardsticks:
    {name: {"ms", "ratio"}}. ratio is the name's ms / our ms; above 1 ours is faster. Names in `flops` also have
    "tflops", TFLOP/s. peer, peer_ms, ratio: name, ms and ratio of the fastest peer, or None. baseline, baseline_ms,
    baseline_ratio: the same of the fastest baseline. failed: {name: reason} of installed peers and of baselines that
    raise or compute something else.
    """
    ours = times[OURS]
    others: dict[str, dict[str, dict[str, float]]] = {"peers": {}, "baselines": {}, "yardsticks": {}}
    for name, ms in times.items():
        if name == OURS:
            continue
        kind = next((kind for kind, names in kinds.items() if name in names), "peers")
        others[kind][name] = {"ms": round(ms, 5), "ratio": round(ms / ours, 3)}
        if name in flops:
            others[kind][name]["tflops"] = round(flops[name] / (ms * 1e-3) / 1e12, 1)
    found = {"shape": shape, "ms": round(ours, 5), "figure": figure(ours), **others, "failed": dict(failed)}
    for kind, prefix in (("peer", ""), ("baseline", "baseline_")):
        best = min(others[f"{kind}s"].items(), key=lambda other: other[1]["ms"], default=(None, {}))
        found |= {kind: best[0], f"{kind}_ms": best[1].get("ms"), f"{prefix}ratio": best[1].get("ratio")}
    return found


def load(op: str) -> ModuleType:
    """Import the benchmark module of an op. Raises ValueError for an unknown op."""
    if op not in benchmarks():
        raise ValueError(f"no benchmark for {op!r}; there are: {', '.join(benchmarks())}")
    return importlib.import_module(benchmarks()[op])


def run(op: str) -> list[dict[str, Any]]:
    module = load(op)
    if hasattr(module, "prepare"):
        module.prepare()
    return [module.case(*shape).row() for shape in module.SHAPES]
