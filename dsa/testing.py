"""For tests and benchmarks, here and in other projects: comparison of results, tensors filled with NaN, and GPU
timing."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return 1 - 2 <x, y> / (<x, x> + <y, y>), in fp64 over all finite entries: 0 for equal tensors, 1 for orthogonal
    ones.

    Entries that are not finite (the -inf of masked scores) must be equal, or the result is infinity; NaN equals NaN.
    The result for two tensors of zeros is 0. Source: the function of this name in DeepGEMM's tests.
    """
    if x.shape != y.shape:
        raise ValueError(f"y: must have x's shape {list(x.shape)}, got {list(y.shape)}")
    x, y = x.double(), y.double()
    finite = x.isfinite()
    if not torch.equal(finite, y.isfinite()) or not torch.equal(x[~finite].nan_to_num(0.5), y[~finite].nan_to_num(0.5)):
        return math.inf
    x, y = x[finite], y[finite]
    norm = (x * x + y * y).sum().item()
    return 1 - 2 * (x * y).sum().item() / norm if norm else 0.0


def assert_close(
    name: str, got: torch.Tensor, expected: torch.Tensor, *, abs_tol: float, rel_tol: float, cos_tol: float = 1e-6
) -> float:
    """Raise AssertionError unless every finite entry differs from the expected entry by at most `abs_tol`, or by at
    most `rel_tol` times the expected entry's magnitude, and `calc_diff` is at most `cos_tol`.

    Non-finite entries must be equal; NaN equals NaN. Return the largest absolute error over the finite entries. Source:
    the rule of FlashMLA's tests.
    """
    if got.shape != expected.shape:
        raise AssertionError(f"{name}: expected shape {list(expected.shape)}, got {list(got.shape)}")
    g, e = got.double(), expected.double().to(got.device)
    special = ~(g.isfinite() & e.isfinite())
    same = (g == e) | (g.isnan() & e.isnan())
    if (wrong := special & ~same).any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(wrong.sum())} non-finite entries differ, first at {at}: {g[at]} for {e[at]}"
        )
    error = torch.where(special, 0.0, (g - e).abs())
    bad = (error > abs_tol) & (error > rel_tol * e.abs())
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.numel()} entries differ by more than {abs_tol} and {rel_tol} relative; "
            f"first at {at}: {g[at]:.8g} for {e[at]:.8g}; largest error {error.max():.3g}"
        )
    if (diff := calc_diff(g, e)) > cos_tol:
        raise AssertionError(f"{name}: calc_diff {diff:.3g} is above {cos_tol}")
    return error.max().item() if error.numel() else 0.0


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
    """Return a tensor filled with values that no result may depend on: NaN for float dtypes, bytes 0xFF for uint8
    (which read as NaN in e4m3, bf16 and fp32), the lowest number for other integers."""
    out = torch.empty(tuple(shape), dtype=dtype, device=device)
    if dtype in (torch.uint8, torch.float8_e4m3fn):
        out.view(torch.uint8).fill_(0xFF)
    elif dtype.is_floating_point:
        out.fill_(math.nan)
    else:
        out.fill_(torch.iinfo(dtype).min)
    return out


def poison_free_memory(device: str | torch.device = "cuda", mebibytes: int = 512) -> None:
    """Fill blocks of 1 MiB to `mebibytes` MiB with NaN, and free them. PyTorch's allocator uses them for outputs, so
    elements that a kernel does not write are NaN."""
    blocks = [poisoned((size << 18,), torch.float32, device) for size in (1, 4, 16, 64) for _ in range(4)]
    blocks.append(poisoned((mebibytes << 18,), torch.float32, device))
    del blocks


_L2_FLUSH_BYTES = 256 << 20


_Call = Callable[[], object]


def bench(calls: Mapping[str, _Call | Sequence[_Call]], *, repeats: int = 20, graph: bool = False) -> dict[str, float]:
    """Return the median milliseconds per call of each implementation, timed in turn on the current CUDA device.

    calls    name -> a function without arguments, or a list of functions over different inputs, called in turn
    repeats  how often each implementation is timed. Implementations take turns, so that changes of clock and
             temperature affect all of them
    graph    capture each implementation's list as one CUDA graph and time replays. Use this option for kernels below
             100 us, because the host takes longer to launch them than they run. The cache is not flushed between the
             functions of a replay, so give inputs that are together larger than the L2 cache

    The L2 cache is flushed before every timed call or replay. Without `graph`, the flush also keeps the GPU busy while
    the host enqueues the call.
    """
    lists = {name: list(c) if isinstance(c, Sequence) else [c] for name, c in calls.items()}
    flush = torch.empty(_L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for functions in lists.values():
        for function in functions:
            function()
    torch.cuda.synchronize()
    graphs = {name: _capture(functions) for name, functions in lists.items()} if graph else {}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in lists}
    for i in range(repeats + 2):
        for name, functions in lists.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            graphs[name].replay() if graph else functions[i % len(functions)]()
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    per_replay = {name: len(functions) if graph else 1 for name, functions in lists.items()}
    return {
        name: statistics.median(a.elapsed_time(b) for a, b in pairs[2:]) / per_replay[name]
        for name, pairs in events.items()
    }


def _capture(functions: Sequence[_Call]) -> torch.cuda.CUDAGraph:
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for function in functions:
            function()
    return captured


def copy_bandwidth() -> float:
    """Return the bytes read plus written per second by a large device-to-device copy: the ceiling of memory-bound
    kernels."""
    source = torch.randint(256, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (bench({"copy": lambda: target.copy_(source)}, repeats=10)["copy"] * 1e-3)


def bf16_gemm_rate(n: int = 8192) -> float:
    """Return the FLOP/s of torch's n x n x n bf16 GEMM on random data: the ceiling of bf16 kernels."""
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / (bench({"gemm": lambda: a @ b}, repeats=10)["gemm"] * 1e-3)


def fp8_gemm_rate(n: int = 8192) -> float:
    """Return the FLOP/s of torch's n x n x n FP8 GEMM (fast accumulation, random data): the ceiling of FP8 kernels."""
    a, b = (torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    call = {
        "gemm": lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    }
    return 2 * n**3 / (bench(call, repeats=10)["gemm"] * 1e-3)
