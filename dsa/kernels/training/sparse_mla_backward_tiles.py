"""Definitions that the roles of the sparse MLA backward kernel share: sizes, shared memory, pipelines, tile scheduler.

A work tile is 64 heads of a query with all of the query's keys, in tiles of 64 keys.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.pipeline import Mbarriers, Pipeline, PipelineState, state_at, state_at_of_two
from dsa.cute.sm90 import WARP, WARPGROUP
from dsa.cute.tile_counter import draw
from dsa.cute.work_tile import WorkTilePipeline
from dsa.kernels.training.limits import MLA_V_CHANNELS, SPARSE_HEAD_TILE, SPARSE_KEY_TILE

TILE, HEADS = SPARSE_KEY_TILE, SPARSE_HEAD_TILE
CHUNK = 64  # channels
VALUE = MLA_V_CHANNELS
CHUNKS = VALUE // CHUNK
HALF, HALF_CHUNKS = VALUE // 2, CHUNKS // 2
ROPE_HALF = 32
CONSUMER_WARPS, THREADS = 8, 3 * WARPGROUP
KEY_ROW_STAGES = 4
HEAD_TERM_BYTES = HEADS * 8


class WarpRole(IntEnum):
    """The first warp of each role. Two consumer warpgroups alternate key tiles; a producer warpgroup gathers."""

    CONSUMER = 0
    PRODUCER = CONSUMER_WARPS


@dataclass(frozen=True)
class BackwardConfig:
    """channels: per key. ordered: store each part of dKV to a separate row instead of adding it."""

    dtype: type[cutlass.Numeric]
    channels: int
    ordered: bool

    @property
    def rope(self) -> bool:
        return self.channels > VALUE

    @property
    def dp_parts(self) -> int:
        """Number of parts, by heads, in which dP is computed. With a rope part, registers do not suffice for all of
        dP."""
        return 2 if self.rope else 1

    @property
    def strip(self) -> int:
        """Channels of dKV per product: 64, or 32 with dS^T also in registers. The latter takes 8% less time with a rope
        part and 5% more without it."""
        return 32 if self.rope else 64

    @property
    def query_chunks(self) -> list[int]:
        """The chunks of Q and dO in the order in which a query's last key tile releases them. CHUNKS is the rope part
        of Q."""
        return [*([CHUNKS] if self.rope else []), *range(CHUNKS)]

    @property
    def k_parts(self) -> int:
        """Number of parts in half of a key tile's channels. In the order of arrival and use: HALF_CHUNKS chunks, then
        half of the rope part as part HALF_CHUNKS."""
        return HALF_CHUNKS + (1 if self.rope else 0)


@dataclass(frozen=True)
class SharedTensors:
    """
    k           [64, 64, 8]: chunks of 64 channels
    k_rope      [64, 32, 2]: the rope part of k
    k_half      [64, 256, 2]: the same memory as k
    q, do       [64, 64, 8]: strips of 64 channels; with a rope part [64, 32, 18] and [64, 32, 16], q's rope part last
    ds          [keys, heads, 2]: dS of each consumer warpgroup's tile
    head_terms  address of l / ln 2 and e of each head
    key_rows    [64, KEY_ROW_STAGES]: row in kv of each key of a tile, -1 if it is invalid
    """

    k: cute.Tensor
    k_rope: cute.Tensor
    k_half: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    head_terms: Int32
    key_rows: cute.Tensor


class WorkTileInfo(NamedTuple):
    """number: index of the work tile. After the last work tile it is at least the number of work tiles."""

    number: Int32


@dataclass(frozen=True)
class BackwardPipelines:
    """q: a one-stage ring per chunk of Q and dO, and one for Q's rope part. k: a one-stage ring per half of a key
    tile's channels, which arrives in `k_parts` parts. ds_full: signals that a key tile's dS is in shared memory."""

    work_tiles: WorkTilePipeline
    q: Pipeline
    k: Pipeline
    ds_full: Mbarriers

    @staticmethod
    def of(storage, cfg: BackwardConfig) -> "BackwardPipelines":
        """Make the pipelines on the kernel's shared memory."""
        return BackwardPipelines(
            WorkTilePipeline.of(storage.work_tiles, WorkTileInfo),
            Pipeline.of(storage.q_barriers, len(cfg.query_chunks)),
            Pipeline.of(storage.k_barriers, 2, cfg.k_parts),
            Mbarriers(storage.ds_full.data_ptr(), 1),
        )

    @cute.jit
    def init(self):
        """Initialize the barriers. Called by one thread."""
        self.work_tiles.init(THREADS // WARP)
        self.q.init(CONSUMER_WARPS)
        # Each producer thread arrives at each part of k. At the first part each warp also arrives once for key_rows.
        Mbarriers(self.k.full, 1).init(WARPGROUP + 4)
        Mbarriers(self.k.full + 1, self.k.stages * self.k.parts - 1).init(WARPGROUP)
        Mbarriers(self.k.empty, self.k.stages).init(4)
        self.ds_full.init(4)

    def q_chunk(self, chunk: int) -> Pipeline:
        """The ring of a chunk of Q and dO. CHUNKS is the rope part of Q."""
        return self.q.ring(chunk, 1)

    def k_half(self, half: int | Int32) -> Pipeline:
        """The ring of a half of a key tile's channels."""
        return self.k.ring(half, 1)


# Each role keeps one register `count`: its number of work tiles so far and, in the lowest two bits, its number of key
# tiles so far, modulo 4. The functions below give the pipeline states at a count.


def work_tile_state(count: Int32) -> PipelineState:
    return state_at_of_two(count >> 2)


def q_state(count: Int32) -> PipelineState:
    return state_at(count >> 2, 1)


def k_state(count: Int32) -> PipelineState:
    return state_at(count, 1)


def next_key_tile(count: Int32) -> Int32:
    return (count & -4) | ((count + 1) & 3)


def next_work_tile(count: Int32) -> Int32:
    return count + 4


@dataclass(frozen=True)
class TileScheduler:
    """A dynamic persistent scheduler. A CTA's first work tile is its block index. While it works on a tile, its
    producer takes the next one from a tile counter in global memory and passes the index on in a WorkTilePipeline.

    work_tiles: number over all queries. key_tiles: number per query. head_tiles: blocks of 64 heads per query.
    """

    work_tiles: Int32
    key_tiles: Int32
    ctas: Int32
    head_tiles: cute.FastDivmodDivisorV2

    @cute.jit
    def first(self) -> WorkTileInfo:
        """The CTA's first work tile."""
        block, _, _ = cute.arch.block_idx()
        return WorkTileInfo(Int32(block))

    @cute.jit
    def advance(self, tile_counter: cute.Tensor, lane) -> WorkTileInfo:
        """Take the next work tile. Called by a whole warp."""
        return WorkTileInfo(self.ctas + draw(tile_counter, lane))

    @cute.jit
    def coordinates(self, number):
        """(query, first head) of a work tile."""
        query, head_tile = divmod(number, self.head_tiles)
        return query, head_tile * HEADS
