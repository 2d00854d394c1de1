"""Data structures that the warp roles of an MLA kernel share: work tiles, rows, shared memory, results.

A work tile is a range of consecutive tiles of TILE_N keys, of one sequence (dense decoding), or of one query or one
group of queries (sparse attention). The load warps get work tiles from a plan or a scheduler and publish them to the
other warps through a WorkTilePipeline (dsa/cute/work_tile.py). A work tile that does not cover all keys of the sequence
or query is a split. For a split the output and score warps write a partial result: O and LSE over the split's keys. A
combine kernel (mla_combine_sm90.py) later combines the partial results of the sequence or query.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.sm90 import WARP


class RoleRegisters(NamedTuple):
    """Registers per thread of each warp role."""

    score: int
    output: int
    load: int


@dataclass(frozen=True)
class Thread:
    """A thread's position in a warp role: index of the warpgroup in the role (`side`), index of the warp in the
    warpgroup, and lane."""

    side: Int32
    warp: Int32
    lane: Int32

    @property
    def tid(self) -> Int32:
        return self.warp * WARP + self.lane


class Coord(NamedTuple):
    """A thread's position in the CTA, and the heads that the CTA computes.

    first_head  first head that the CTA computes
    heads       number of heads of a query; several CTAs can compute different heads of the same query
    thread      the result of `SparseMlaKernel.thread`, which can be None
    """

    tid: Int32
    warp: Int32
    lane: Int32
    first_head: Int32
    heads: Int32
    thread: Thread | None


class WorkTileInfo(NamedTuple):
    """A work tile, as the load warps publish it to the other warps.

    batch_idx   index of the sequence (dense), or of the query or group of queries (sparse); negative in the end marker
    first_tile  first tile of keys, counted from the start of the sequence or list
    tiles       number of tiles
    split_idx   index of the partial result to write; negative if the work tile is not a split
    length      (dense) number of keys of the sequence, but at most as many as the block table covers
    seen        (dense) number of keys of the sequence, also if the block table covers fewer. The causal mask is
                relative to this number
    """

    batch_idx: Int32
    first_tile: Int32
    tiles: Int32
    split_idx: Int32
    length: Int32
    seen: Int32

    @staticmethod
    def last() -> "WorkTileInfo":
        return WorkTileInfo(Int32(-1), Int32(0), Int32(0), Int32(-1), Int32(0), Int32(0))


@dataclass(frozen=True)
class QTile:
    """The rows that a CTA computes. The work tile's sequence, query or group has `rows` rows for KV head `kv_head`. The
    CTA computes TILE_M of these rows, from `first_row` on.

    A subclass adds `coord(batch_idx, row)`, which returns (sequence, query, head) of a row in the results.
    """

    rows: Int32
    first_row: Int32
    kv_head: Int32

    def has_row(self, batch_idx: Int32, row: Int32):
        """Whether row `row` exists in the work tile with this `batch_idx`. The CTA's other rows are padding."""
        return row < self.rows


@dataclass(frozen=True)
class MlaShared:
    """A CTA's shared memory.

    pipeline  pipelines of work tiles and keys
    exchange  P and other data that score warpgroups pass to output warpgroups; with swap A/B also Q
    kv        stages of keys: KvTensors for 16-bit keys, the address of the stages for FP8 keys
    q         without swap A/B: the k chunks of Q that are not in registers
    staging   for 16-bit keys with swap A/B: memory to stage O, 16 x head_tile elements per output warp
    """

    pipeline: Any
    exchange: Any
    kv: Any
    q: cute.Tensor | None = None
    staging: cute.Pointer | None = None


@dataclass(frozen=True)
class Results:
    """The outputs of a kernel in global memory, and the attention sinks in shared memory.

    out          [B, s_q, h_q, 512] in q's dtype: B sequences with s_q queries, h_q query heads and h_k KV heads
    lse          [B, h_q, s_q] fp32
    out_partial  [splits, h_k, rows, 512] fp32, with s_q * h_q / h_k rows
    lse_partial  [splits, h_k, rows] fp32
    max_logits   [B, h_q] fp32, or None; always None if s_q > 1 or if there are splits
    sink         [TILE_M or head_tile] fp32 in shared memory: the sinks of the CTA's rows, multiplied by log2(e); -inf
                 for a row without a sink. In dense decoding `sink` is None
    """

    out: cute.Tensor
    lse: cute.Tensor
    out_partial: cute.Tensor
    lse_partial: cute.Tensor
    max_logits: cute.Tensor | None = None
    sink: cute.Tensor | None = None
