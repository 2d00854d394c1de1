"""The launch of sparse MLA attention, for prefill and decoding."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from dsa import backends
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import dtype_name, unit_inner

D_V = 512
DIMS = (576, 512)
DTYPES = (torch.bfloat16, torch.float16)
TILE, ROWS = 64, 64  # keys and heads of a kernel's tile
FEW_ROWS = (16, 32)  # heads of the kernel for few
# Of byte caches, by the heads of a CTA: about how long a tile takes, and what is spent besides where queries are cut,
# in microseconds on an H200. More heads share the work on a key's bytes; less leave smaller partial results.
BYTE_TIMES = {16: (1.25, 8.0), 32: (1.5, 13.0), 64: (2.65, 20.0)}
WHOLE = 5.0  # what is spent besides where they are not
CUT = 3  # what cutting queries costs, in tiles
LEAST = 2  # tiles that a share should have


class Selection(NamedTuple):
    """cache [pages, P, d] in q's dtype or [pages, P, 656 | 584] bytes, keys at multiples of 16 bytes; indices [T, K];
    and if given, counts [B]: how many of a query's indices count."""

    cache: torch.Tensor
    indices: torch.Tensor
    counts: torch.Tensor | None


class Results(NamedTuple):
    """out [B, s_q, h, 512], lse [B, h, s_q] and, if wanted, max_logits [T, h], T = B s_q."""

    out: torch.Tensor
    lse: torch.Tensor
    max_logits: torch.Tensor | None


def attend(
    q: torch.Tensor,
    selections: list[Selection],
    scale: float,
    sink: torch.Tensor | None,
    results: Results,
    may_cut: bool,
) -> None:
    """q [T, h, d] over one or two selections; T, h, K and the caches' sizes above 0.

    may_cut  a query's keys may be worked on in pieces; how, depends on the number of queries. Not with max_logits
    """
    queries, heads, dim = q.shape
    aligned = rows_at_16_bytes(q)
    q = q.clone(memory_format=torch.contiguous_format) if aligned is None else aligned
    tiles = sum(-(-s.indices.shape[1] // TILE) for s in selections)
    fp8 = selections[0].cache.dtype == torch.uint8
    num_sms = backends.num_sms(q.device)
    rows = next((rows for rows in FEW_ROWS if heads <= rows), ROWS)
    if fp8:
        rows = byte_rows(queries, heads, tiles, num_sms, may_cut)
    parts, rounds, cut = shares(queries, -(-heads // rows), tiles, num_sms, may_cut)
    caches, indices, counts = zip(*selections)
    lists = (
        list(caches),
        list(indices),
        [index[0] if count is None else count for index, count in zip(indices, counts)],
        sum(1 << i for i, count in enumerate(counts) if count is not None),
    )
    out, lse, max_logits = results
    highest = max_logits is not None
    sinks = (lse.view(-1) if sink is None else sink, int(sink is not None))
    slots = max(2 * cut, 1)
    out_parts = q.new_empty(slots, 1, heads, D_V, dtype=torch.float32)
    lse_parts = q.new_empty(slots, 1, heads, dtype=torch.float32)
    if fp8:
        launch, largest = _bytes_kernel(dim, rows, len(selections)), ()
    else:
        launch = _kernel(q.dtype, dim, rows, len(selections), highest)
        largest = (max_logits,)
    with backends.on_device(q):
        launch(
            *(q.unsqueeze(1), *lists, *sinks, out, lse, out_parts, lse_parts, *largest),
            *(scale * math.log2(math.e), out.shape[1], parts, rounds, cut),
        )
        if cut:
            rest = queries - rounds * parts
            combine = _combine_kernel(q.dtype, cut // rest + 1, rest * heads)
            combine(*sinks, out, lse, out_parts, lse_parts, parts, rounds, tiles, cut)


def shares(queries: int, row_tiles: int, tiles: int, num_sms: int, may_cut: bool) -> tuple[int, int, int]:
    """(parts, rounds, cut): so many CTAs for each tile of heads have whole queries so many times; the queries behind
    rounds * parts are cut into even shares for the first `cut` of them."""
    parts = max(1, num_sms // row_tiles)
    rounds, rest = divmod(queries, parts)
    cut = min(parts, rest * tiles // LEAST)
    if rest and (not may_cut or cut <= rest or -(-rest * tiles // cut) + CUT >= tiles):
        rounds, cut = rounds + 1, 0
    return min(parts, max(queries, cut)), rounds, cut


def byte_rows(queries: int, heads: int, tiles: int, num_sms: int, may_cut: bool) -> int:
    """Heads of a CTA, of byte caches: what takes least by the measured times; but where queries are never cut, as for
    short windows, what the number of heads says, so that a result does not depend on the other queries."""

    def time(rows: int) -> float:
        (of_tile, besides), row_tiles = BYTE_TIMES[rows], -(-heads // rows)
        parts, rounds, cut = shares(queries, row_tiles, tiles, num_sms, may_cut)
        turns = -(-row_tiles // num_sms)  # more than one where there are more tiles of heads than multiprocessors
        if not cut:
            return WHOLE + turns * rounds * tiles * of_tile
        return besides + turns * (rounds * tiles + -(-(queries - rounds * parts) * tiles // cut)) * of_tile

    most = next((rows for rows in BYTE_TIMES if heads <= rows), max(BYTE_TIMES))
    if not may_cut or tiles <= CUT + 1:
        return most
    return min((rows for rows in BYTE_TIMES if rows <= most), key=lambda rows: (time(rows), -rows))


def inner_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x, copied if its last dimension is not contiguous; it is small."""
    return unit_inner(x) if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


@functools.cache
def _kernel(dtype: torch.dtype, dim: int, rows: int, lists: int, highest: bool) -> Callable[..., None]:
    if rows < ROWS:
        from dsa.kernels.mla.sparse_mla_swap_ab_sm90 import compile_sparse_mla_few

        return compile_sparse_mla_few(dtype_name(dtype), dim, rows, lists, highest)
    from dsa.kernels.mla.sparse_mla_sm90 import compile_sparse_mla

    return compile_sparse_mla(dtype_name(dtype), dim, lists, highest)


@functools.cache
def _bytes_kernel(dim: int, rows: int, lists: int) -> Callable[..., None]:
    from dsa.kernels.mla.sparse_mla_fp8_kv_sm90 import compile_sparse_mla_bytes

    return compile_sparse_mla_bytes(dim, rows, lists)


@functools.cache
def _combine_kernel(dtype: torch.dtype, splits: int, rows: int) -> Callable[..., None]:
    from dsa.kernels.mla.mla_combine_sm90 import choose_config
    from dsa.kernels.mla.sparse_mla_combine_sm90 import compile_sparse_mla_combine

    return compile_sparse_mla_combine(dtype_name(dtype), choose_config(splits, rows))
