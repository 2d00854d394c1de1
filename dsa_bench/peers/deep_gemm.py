"""DeepGEMM: 2.8.1, as vLLM ships it, and the older build that SGLang ships, whose index scores can be cleaned.

Facts, on Hopper:
- index scores: 32 or 64 heads of 32, 64 or 128 channels, weights fp32. 2.8.1 gets the queries as (q, None) and returns
  compressed rows that are not cleaned: column j of a row is key start + j, and columns after the end are not written.
  `max_seqlen_k` bounds the keys of a row and must be positive
- paged scores: pages of 64 keys, lengths [B, next_n], next_n 1 or 2. 2.8.1 also accepts next_n 4; its plan is then for
  half the number of SMs, because two SMs share a task
- products: scales of rows fp32, column-major; scales of matrices [n / 128, k / 128]; results bf16. In grouped products
  each group's rows begin at a multiple of 128 (contiguous), or all groups have the same number of rows and a count of
  valid rows (masked)
- nvcc compiles at the first call, 10 s and more per kernel. A product has a kernel per columns, channels, groups and
  tile, and the tile also depends on the rows. Kernels stay in the folder that the environment variable
  DG_JIT_CACHE_DIR names. Their keys are the source, the compiler and its options with the package's path, so another
  machine can use the folder if it has the package at the same path
"""

import concurrent.futures
import contextlib
import math
import multiprocessing
from collections.abc import Iterable, Sequence
from functools import partial
from types import ModuleType

import torch

from dsa_bench.harness.calls import Call, Peers, into
from dsa_bench.peers.package import Library, launch_programmatically

NEW = Library("deepgemm 2.8.1", ("vllm.third_party.deep_gemm",), launch_programmatically)
OLD = Library("deepgemm", ("deep_gemm",), launch_programmatically)
BUILDS = (NEW, OLD)  # the newest first
ALIGNMENT = 128  # the index of a group's first row is a multiple of this
_PROCESSES = 16
# Fraction of the GPU's free memory for the compiling processes. Each process allocates the weights of all groups.
_MEMORY = 0.8
_ROWS_MEMORY = 5 << 30  # bytes for padded rows per compiling process, in addition to its weights
Scaled = tuple[torch.Tensor, torch.Tensor]


def mqa_logits(q: torch.Tensor, kv: Scaled, weights, starts, ends, clean: bool) -> Peers:
    """Return calls of both builds' `fp8_mqa_logits` (in 2.8.1 `fp8_fp4_mqa_logits`). starts must be 0: then a
    compressed row equals a row of all keys. clean: the older build writes -inf for scores out of range; 2.8.1
    cannot."""

    def old(module: ModuleType, *arguments) -> Call:
        return partial(module.fp8_mqa_logits, *arguments, clean_logits=clean)

    inputs = [(q, kv, weights, starts, ends)]
    new = Peers.of({NEW: new_mqa_logits}, inputs, "{}, not cleaned" if clean else "{}")
    return new | Peers.of({OLD: old}, inputs)


def new_mqa_logits(module: ModuleType, q, kv, weights, starts, ends) -> Call:
    return partial(module.fp8_fp4_mqa_logits, (q, None), kv, weights, starts, ends, len(kv[0]))


def paged_mqa_logits(inputs: Iterable[tuple]) -> Peers:
    """Return calls of both builds' `fp8_paged_mqa_logits` (in 2.8.1 `fp8_fp4_paged_mqa_logits`), if they accept the
    number of queries. inputs: (q, pages, weights, lengths [B], block_table, columns). Plans are made outside the
    timing."""
    inputs = list(inputs)
    next_n = inputs[0][0].shape[1]
    makes = {NEW: _new_paged_mqa_logits} if next_n in (1, 2, 4) else {}
    if next_n in (1, 2):
        makes[OLD] = _old_paged_mqa_logits
    return Peers.of(makes, inputs)


def _new_paged_mqa_logits(module: ModuleType, q, pages, weights, lengths, table, columns) -> Call:
    visible = visible_keys(lengths, q.shape[1])
    plan = _plan(module, visible, pages.shape[1], tasks_of_two=q.shape[1] == 4)()
    return partial(module.fp8_fp4_paged_mqa_logits, (q, None), pages, weights, visible, table, plan, columns)


def _old_paged_mqa_logits(module: ModuleType, q, pages, weights, lengths, table, columns) -> Call:
    visible = visible_keys(lengths, q.shape[1])
    plan = _plan(module, visible, pages.shape[1])()
    return partial(module.fp8_paged_mqa_logits, q, pages, weights, visible, table, plan, columns, clean_logits=False)


def visible_keys(lengths: torch.Tensor, next_n: int) -> torch.Tensor:
    """Return int32 [B, next_n]: the number of keys that each of a sequence's last next_n tokens sees. lengths: the
    sequences' numbers of keys, [B]."""
    return lengths[:, None] + torch.arange(1 - next_n, 1, dtype=torch.int32, device=lengths.device)


def plans(lengths: torch.Tensor, page: int, copies: int) -> Peers:
    """Return, per build, `copies` equal calls that make the plan of paged scores with one query per sequence."""
    return Peers.of(dict.fromkeys(BUILDS, _plan), [(lengths[:, None].contiguous(), page)] * copies)


def _plan(module: ModuleType, visible: torch.Tensor, page: int, tasks_of_two: bool = False) -> Call:
    """Return a call that makes the plan of paged scores. tasks_of_two: two SMs share a task."""
    return partial(module.get_paged_mqa_logits_metadata, visible, page, module.get_num_sms() // (1 + tasks_of_two))


def product(a: Scaled, weights: Sequence[Scaled], builds: Sequence[Library] = BUILDS) -> Peers:
    """Return calls of `fp8_gemm_nt` with each of the weights. Results are (out, None): out has no padding."""
    return Peers.of(dict.fromkeys(builds, _product), [(a, b) for b in weights])


def _product(module: ModuleType, a: Scaled, b: Scaled) -> Call:
    out = torch.empty(len(a[0]), len(b[0]), dtype=torch.bfloat16, device=a[0].device)
    operand = a[0], module.get_mn_major_tma_aligned_tensor(a[1])
    return partial(into, (out, None), partial(module.fp8_gemm_nt, operand, b, out))


def grouped_product(a: Scaled, b: Scaled, ends: torch.Tensor, builds: Sequence[Library] = BUILDS) -> Peers:
    """Return calls of `m_grouped_fp8_gemm_nt_contiguous` and, if no group has more than ALIGNMENT rows, of 2.8.1's
    masked product. Results are (out, indices of our rows in out)."""
    peers = Peers.of(dict.fromkeys(builds, _contiguous), [(a, b, ends)])
    if NEW in builds and int(sizes_of(ends).max()) <= ALIGNMENT:
        peers |= Peers.of({NEW: _masked}, [(a, b, ends)], "{}, masked")
    return peers


def sizes_of(ends: torch.Tensor) -> torch.Tensor:
    return ends.diff(prepend=ends.new_zeros(1))


def _contiguous(module: ModuleType, a: Scaled, b: Scaled, ends: torch.Tensor) -> Call:
    sizes = sizes_of(ends)
    padded = (sizes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    groups = torch.repeat_interleave(torch.arange(len(ends), device=ends.device, dtype=torch.int32), padded)
    rows = _places(ends, padded.cumsum(0) - padded)
    q, s = _spread(a, rows, len(groups))
    out = torch.empty(len(groups), b[0].shape[1], dtype=torch.bfloat16, device=q.device)
    operand = q, module.get_mn_major_tma_aligned_tensor(s)
    return partial(into, (out, rows), partial(module.m_grouped_fp8_gemm_nt_contiguous, operand, b, out, groups))


def _masked(module: ModuleType, a: Scaled, b: Scaled, ends: torch.Tensor) -> Call:
    count = len(ends)
    sizes = sizes_of(ends).to(torch.int32)
    rows = _places(ends, torch.arange(count, device=ends.device) * ALIGNMENT)
    q, s = (x.unflatten(0, (count, ALIGNMENT)) for x in _spread(a, rows, count * ALIGNMENT))
    out = torch.empty(count, ALIGNMENT, b[0].shape[1], dtype=torch.bfloat16, device=q.device)
    operand, expected = (q, module.get_mn_major_tma_aligned_tensor(s)), max(1, -(-len(a[0]) // count))
    return partial(
        into, (out.flatten(0, 1), rows), partial(module.m_grouped_fp8_gemm_nt_masked, operand, b, out, sizes, expected)
    )


def _places(ends: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return the new index of each of our rows, int64, if group g is moved to begin at row starts[g]."""
    sizes = sizes_of(ends)
    moved = torch.repeat_interleave(starts - (ends - sizes), sizes)
    return torch.arange(len(moved), device=ends.device) + moved


def _spread(a: Scaled, rows: torch.Tensor, count: int) -> Scaled:
    """Return (values, scales) of `count` rows. Row i of `a` becomes row rows[i]; all other rows are 0."""
    q = torch.zeros(count, a[0].shape[1], dtype=torch.uint8, device=a[0].device)
    q[rows] = a[0].view(torch.uint8)
    s = torch.ones(count, a[1].shape[1], device=a[1].device)
    s[rows] = a[1]
    return q.view(torch.float8_e4m3fn), s


def compile_products(shapes: Iterable[tuple], device: str = "cuda", builds: Sequence[Library] = BUILDS) -> None:
    """Compile products in parallel processes, because nvcc needs seconds for each. shapes: (rows, columns, channels),
    or for grouped products (rows before routing, columns, channels, experts, top k).

    Each process allocates the weights of all groups, so the GPU's memory bounds the number of processes. Failures are
    ignored: they occur again in the benchmark, which reports them.
    """
    # Sort by rows first, so that successive shapes have matrices of different sizes. Such shapes share no kernel. So
    # two processes seldom compile the same kernel at the same time.
    shapes = sorted(set(shapes))
    if not shapes or not Peers.of(dict.fromkeys(builds, lambda module: None), [()]).calls:
        return
    processes = min(_PROCESSES, len(shapes))
    if device == "cuda" and torch.cuda.is_available():
        largest = max(math.prod(shape[1:4]) for shape in shapes)
        room = _MEMORY * torch.cuda.mem_get_info()[0]
        processes = max(1, min(processes, int(room // (largest + _ROWS_MEMORY))))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        for future in [pool.submit(_compile, device, builds, *shape) for shape in shapes]:
            with contextlib.suppress(Exception):
                future.result()


def _compile(
    device: str, builds: Sequence[Library], rows: int, columns: int, channels: int, experts: int = 0, top_k: int = 1
) -> None:
    a = _unset((rows * top_k,), channels, 1, device)
    b = _unset((experts, columns) if experts else (columns,), channels, 128, device)
    for library in builds:  # one library at a time to limit memory, because each allocates padded rows
        if experts:
            peers = grouped_product(a, b, routed(rows, experts, top_k, device), [library])
        else:
            peers = product(a, [b], [library])
        for (call,) in peers.calls.values():
            with contextlib.suppress(Exception):
                call()
        if device == "cuda":
            torch.cuda.synchronize()
            del peers
            torch.cuda.empty_cache()


def _unset(shape: tuple[int, ...], channels: int, block: int, device: str) -> Scaled:
    """Return uninitialised e4m3 values [*shape, channels], and scales of 1 per `block` rows and 128 channels."""
    q = torch.empty(*shape, channels, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return q, torch.ones(*shape[:-1], -(-shape[-1] // block), channels // 128, device=device)


def routed(rows: int, experts: int, top_k: int, device: str = "cuda") -> torch.Tensor:
    """Return int32 [experts]: the ends of the experts' rows, if each of `rows` rows goes to `top_k` random experts."""
    chosen = torch.rand(rows, experts, device=device).argsort(-1)[:, :top_k].flatten()
    return torch.bincount(chosen, minlength=experts).cumsum(0).to(torch.int32)


def used(ends: torch.Tensor) -> int:
    """Return the number of experts that have rows."""
    return int((sizes_of(ends) > 0).sum())
