"""Launch sparse MLA attention, for prefill and decoding."""

import functools
import math
from typing import NamedTuple

import torch

from dsa.kernels.mla import limits
from dsa.kernels.mla.limits import (
    HEAD_DIM_V,
    NARROW_DIMS,
    NARROW_WARPS,
    SPARSE_HEAD_DIMS,
    SWAP_AB_HEADS,
    TILE_M,
    TILE_N,
)
from dsa.runtime import backends
from dsa.runtime.declare import INT_MAX, dtype_name, rows_at_16_bytes, unit_inner

DTYPES = tuple(getattr(torch, name) for name in limits.DTYPES)
# For FP8 caches, by heads per CTA: microseconds per key tile on an H200, and fixed overhead in microseconds if queries
# are split. With more heads per CTA one conversion of a key serves more heads; with fewer heads partial results are
# smaller.
FP8_KV_TIMES = {16: (1.25, 8.0), 32: (1.5, 13.0), 64: (2.65, 20.0)}
WHOLE = 5.0  # fixed overhead in microseconds if no query is split
SPLIT_COST = 3  # of splitting queries, in key tiles per CTA
LEAST_TILES = 2  # lower limit of the key tiles per CTA that works on split queries
SHORT_LIST_HEADS = 32  # upper limit of the heads per CTA for lists that are too short to be split


# {channels of a key: channels of its value} that the kernels support
DIMS = dict.fromkeys(SPARSE_HEAD_DIMS, HEAD_DIM_V) | dict(NARROW_DIMS)


class Selection(NamedTuple):
    """Keys selected by T = B * s_q queries.

    cache    [pages, P, d] in q's dtype, or bytes [pages, P, 656 | 584]. Keys start at multiples of 16 bytes. In a page
             of P * 584 bytes they are 576 bytes apart, and 8 bytes of scales per key follow the last key
    indices  [T, K] int32: page * P + offset
    counts   None, or [B] int32: query t uses only its first counts[t // s_q] indices

    For flash_mla_sparse_fwd, which returns max_logits, cache is [s_kv, 1, d], indices [T, 1, K] and counts [T].
    """

    cache: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor | None


class Results(NamedTuple):
    """Allocated results. flash_mla_sparse_fwd: out [T, h, 512], lse and max_logits [T, h]. All other ops: out [B, s_q,
    h, 512], lse [B, h, s_q], and max_logits is None."""

    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor | None


def attend(
    q: torch.Tensor,
    selections: list[Selection],
    scale: float,
    sink: torch.Tensor | None,
    results: Results,
    may_split: bool,
) -> None:
    """Write attention of q [T, h, d] to the keys of one or two selections into `results`. T, h, K and the sizes of the
    caches are above 0.

    may_split  whether a query's keys may be split among several CTAs. The split, and so the rounding, depends on the
               number of queries T. Must be False with max_logits
    """
    from dsa.kernels.mla.mla_combine_sm90 import choose_config, compile_sparse_mla_combine
    from dsa.kernels.mla.sparse_mla_fp8_kv_sm90 import compile_sparse_mla_fp8_kv
    from dsa.kernels.mla.sparse_mla_sm90 import compile_sparse_mla
    from dsa.kernels.mla.sparse_mla_swap_ab_sm90 import compile_sparse_mla_swap_ab

    queries, heads, dim = q.shape
    dtype = dtype_name(q.dtype)
    q = aligned(q)
    tiles = sum(-(-s.indices.shape[-1] // TILE_N) for s in selections)
    fp8 = selections[0].cache.dtype == torch.uint8
    num_sms = backends.num_sms(q.device)
    head_tile = next((tile for tile in SWAP_AB_HEADS if heads <= tile), TILE_M)
    if fp8:
        head_tile = fp8_kv_head_tile(queries, heads, tiles, num_sms, may_split)
    workers, full_waves, split_workers = stream_k(queries, -(-heads // head_tile), tiles, num_sms, may_split)
    lists, sinks = list_arguments(selections, q.device), sink_arguments(sink, q.device)
    out, lse, max_logits = results
    partial = _partial_results(2 * split_workers, heads, q.device) if split_workers else no_partial(heads, q.device)
    if fp8:
        launch = compile_sparse_mla_fp8_kv(dim, head_tile, len(selections))
    elif head_tile < TILE_M:
        launch = compile_sparse_mla_swap_ab(dtype, dim, head_tile, len(selections), max_logits is not None)
    else:
        launch = compile_sparse_mla(dtype, dim, len(selections), max_logits is not None)
    rows, s_q = (q.unsqueeze(1), out.shape[1]) if max_logits is None else (q, 1)
    launch(
        *(rows, *lists, *sinks, out, lse, *partial, max_logits),
        *(scale * math.log2(math.e), s_q, workers, full_waves, split_workers),
    )
    if split_workers:
        rest = queries - full_waves * workers
        combine = compile_sparse_mla_combine(dtype, choose_config(split_workers // rest + 1, rest * heads))
        combine(*sinks, out, lse, *partial, workers, full_waves, tiles, split_workers)


def check_value_dim(name: str, d: int, d_v: int) -> None:
    """Raise ValueError unless the kernels support values of d_v channels for keys of d channels."""
    if DIMS[d] != d_v:
        raise ValueError(f"{name}: must be {DIMS[d]} for d = {d}, got {d_v}")


def attend_narrow(
    q: torch.Tensor, selection: Selection, scale: float, sink: torch.Tensor | None, results: Results, few: bool
) -> None:
    """Write attention of q [B, s_q, h, d] to the keys of one selection into `results`, for d in NARROW_DIMS. B, s_q, h,
    K and the size of the cache are above 0.

    results  out [B, s_q, h, d_v], lse [B, h, s_q] and max_logits [B, s_q, h] or None
    few      whether more warps may share a query if there are few queries. The rounding then depends on their number
    """
    from dsa.kernels.mla.sparse_mla_narrow_sm90 import HEADS, compile_narrow_sparse_mla

    q = aligned(q)
    batch, s_q, heads, dim = q.shape
    few = few and batch * s_q * -(-heads // HEADS) <= backends.num_sms(q.device)
    warps = max(NARROW_WARPS) if few else min(NARROW_WARPS)
    launch = compile_narrow_sparse_mla(
        dtype_name(q.dtype), dim, results.out.shape[-1], warps, results.max_logits is not None
    )
    no_count, _ = _absent(q.device)
    counted = selection.counts is not None
    counts = selection.counts if counted else no_count
    launch(
        *(q, selection.cache, selection.indices, counts, int(counted), *sink_arguments(sink, q.device)),
        *(*results, scale * math.log2(math.e)),
    )


def aligned(q: torch.Tensor) -> torch.Tensor:
    """Return q, or a contiguous copy if the rows of q are not contiguous or do not start at multiples of 16 bytes."""
    rows = rows_at_16_bytes(q)
    return q.clone(memory_format=torch.contiguous_format) if rows is None else rows


def of_caller(out: torch.Tensor) -> torch.Tensor:
    """Return the caller's out [..., h, d_v] with the strides of dimensions of size 1 replaced, as kernels require."""
    out, d_v = rows_at_16_bytes(out), out.shape[-1]
    if out.stride(-2) == d_v:
        return out
    return out.as_strided(out.shape, (*out.stride()[:-2], d_v, 1))


def list_arguments(
    selections: list[Selection], device: torch.device
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], int]:
    """Return (caches, indices, counts, counted) for a kernel. Bit i of counted says whether selection i has counts."""
    caches, indices, counts = zip(*selections)
    no_count, _ = _absent(device)
    return (
        list(caches),
        list(indices),
        [no_count if count is None else count for count in counts],
        sum(1 << i for i, count in enumerate(counts) if count is not None),
    )


def sink_arguments(sink: torch.Tensor | None, device: torch.device) -> tuple[torch.Tensor, int]:
    return _absent(device)[1] if sink is None else sink, int(sink is not None)


def stream_k(queries: int, head_tiles: int, tiles: int, num_sms: int, may_split: bool) -> tuple[int, int, int]:
    """Return (workers, full_waves, split_workers) of the StreamKScheduler. tiles: key tiles per query.

    For each tile of heads there are `workers` CTAs. Each CTA computes at most full_waves unsplit queries. The key tiles
    of the remaining queries are divided evenly among the first split_workers CTAs. If split_workers is 0, no query is
    split."""
    workers = max(1, num_sms // head_tiles)
    full_waves, rest = divmod(queries, workers)
    split_workers = min(workers, rest * tiles // LEAST_TILES)
    may_split = may_split and split_workers * rest * tiles <= INT_MAX  # the scheduler computes this product in int32
    if rest and (not may_split or split_workers <= rest or -(-rest * tiles // split_workers) + SPLIT_COST >= tiles):
        full_waves, split_workers = full_waves + 1, 0
    return min(workers, max(queries, split_workers)), full_waves, split_workers


def fp8_kv_head_tile(queries: int, heads: int, tiles: int, num_sms: int, may_split: bool) -> int:
    """For FP8 caches, return the number of heads per CTA that is fastest according to FP8_KV_TIMES.

    If queries may not be split, only the number of heads decides, so that a result does not depend on the other
    queries. The same holds for short lists, such as windows: they are not split, and 16 and 32 heads per CTA give the
    same bits."""

    def time(head_tile: int) -> float:
        (of_tile, overhead), head_tiles = FP8_KV_TIMES[head_tile], -(-heads // head_tile)
        workers, full_waves, split_workers = stream_k(queries, head_tiles, tiles, num_sms, may_split)
        turns = -(-head_tiles // num_sms)  # above 1 if there are more head tiles than SMs
        if not split_workers:
            return WHOLE + turns * full_waves * tiles * of_tile
        split_tiles = -(-(queries - full_waves * workers) * tiles // split_workers)
        return overhead + turns * (full_waves * tiles + split_tiles) * of_tile

    most = next((head_tile for head_tile in FP8_KV_TIMES if heads <= head_tile), max(FP8_KV_TIMES))
    if not may_split:
        return most
    if tiles <= SPLIT_COST + 1:
        most = min(most, SHORT_LIST_HEADS)
    return min((tile for tile in FP8_KV_TIMES if tile <= most), key=lambda tile: (time(tile), -tile))


def inner_contiguous(x: torch.Tensor) -> torch.Tensor:
    return unit_inner(x) if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _partial_results(splits: int, heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (splits, 1, heads)
    out = torch.empty(*shape, HEAD_DIM_V, dtype=torch.float32, device=device)
    return out, torch.empty(shape, dtype=torch.float32, device=device)


@functools.cache
def no_partial(heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return placeholders for the partial results of a launch that splits no query."""
    return _partial_results(1, heads, device)


@functools.cache
def _absent(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return placeholders (int32 [1], fp32 [1]) for counts and a sink that are None."""
    return tuple(torch.empty(1, dtype=dtype, device=device) for dtype in (torch.int32, torch.float32))
