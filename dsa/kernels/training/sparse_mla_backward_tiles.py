"""What the roles of the sparse MLA backward kernel share: its sizes, shared memory, pipelines and the tile scheduler.

A work tile is 64 heads of a query, with all of the query's keys, which come in tiles of 64.
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
    """The first warp of each role. Two consumer warpgroups own the key tiles in turns; a producer warpgroup gathers."""

    CONSUMER = 0
    PRODUCER = CONSUMER_WARPS


@dataclass(frozen=True)
class BackwardConfig:
    """Keys of `channels` numbers; `ordered`: the parts of dKV are stored to rows of their own, not added."""

    dtype: type[cutlass.Numeric]
    channels: int
    ordered: bool

    @property
    def rope(self) -> bool:
        return self.channels > VALUE

    @property
    def dp_parts(self) -> int:
        """In how many parts of the heads dP is computed: with a rope part, registers do not suffice for all of it."""
        return 2 if self.rope else 1

    @property
    def strip(self) -> int:
        """Channels of dKV that are multiplied at a time: 64, or 32 with dS^T for it in registers, too. With a rope part
        the latter takes 8% less time, without it 5% more."""
        return 32 if self.rope else 64

    @property
    def query_chunks(self) -> list[int]:
        """The chunks of Q and dO in the order in which a query's last key tile is through with them; CHUNKS is the
        rope part of Q."""
        return [*([CHUNKS] if self.rope else []), *range(CHUNKS)]

    @property
    def k_parts(self) -> int:
        """Of a half of a key tile's channels, in the order in which they arrive and are multiplied: HALF_CHUNKS chunks,
        and then a half of the rope part, which is number HALF_CHUNKS."""
        return HALF_CHUNKS + (1 if self.rope else 0)


@dataclass(frozen=True)
class SharedTensors:
    """k: chunks of 64 channels [64, 64, 8], its rope part k_rope [64, 32, 2]; k_half [64, 256, 2] is the same memory as
    k. q, do: strips [64, 64, 8], or of 32 channels with q's rope part behind the others [64, 32, 18 and 16]. ds [keys,
    heads, 2]: of each consumer warpgroup's tiles. head_terms: the address of l / ln 2 and e of each head. key_rows [64,
    KEY_ROW_STAGES]: the row of kv of each of a tile's keys, -1 for none."""

    k: cute.Tensor
    k_rope: cute.Tensor
    k_half: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    head_terms: Int32
    key_rows: cute.Tensor


class WorkTileInfo(NamedTuple):
    """number: of the work tile; behind the last one, as many as there are or more."""

    number: Int32


@dataclass(frozen=True)
class BackwardPipelines:
    """q: of each chunk of Q and dO, and of Q's rope part, a ring of one stage. k: of each half of a key tile's channels
    a ring of one stage, which arrives in `k_parts` parts. ds_full: dS of a key tile is in shared memory."""

    work_tiles: WorkTilePipeline
    q: Pipeline
    k: Pipeline
    ds_full: Mbarriers

    @staticmethod
    def of(storage, cfg: BackwardConfig) -> "BackwardPipelines":
        """Of the kernel's shared memory."""
        return BackwardPipelines(
            WorkTilePipeline.of(storage.work_tiles, WorkTileInfo),
            Pipeline.of(storage.q_barriers, len(cfg.query_chunks)),
            Pipeline.of(storage.k_barriers, 2, cfg.k_parts),
            Mbarriers(storage.ds_full.data_ptr(), 1),
        )

    @cute.jit
    def init(self):
        """One thread's work."""
        self.work_tiles.init(THREADS // WARP)
        self.q.init(CONSUMER_WARPS)
        # Each thread that gathers arrives at each part of k. With the first part its warp also says which keys there
        # are.
        Mbarriers(self.k.full, 1).init(WARPGROUP + 4)
        Mbarriers(self.k.full + 1, self.k.stages * self.k.parts - 1).init(WARPGROUP)
        Mbarriers(self.k.empty, self.k.stages).init(4)
        self.ds_full.init(4)

    def q_chunk(self, chunk: int) -> Pipeline:
        """The ring of a chunk of Q and dO; CHUNKS is the rope part of Q."""
        return self.q.ring(chunk, 1)

    def k_half(self, half: int | Int32) -> Pipeline:
        """The ring of a half of a key tile's channels."""
        return self.k.ring(half, 1)


# A role's `count` has the number of its work tiles so far and, in the lowest two bits, that of its key tiles so far,
# over the whole life of the CTA: one register for both. These are the states of the pipelines at a count.


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
    """A dynamic persistent scheduler: each CTA begins with the work tile of its own number, and draws the next one
    from a tile counter in global memory while it works. Its producer passes the number on in a WorkTilePipeline.

    work_tiles, key_tiles: how many there are, of all queries and of one query; head_tiles: blocks of 64 heads
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
        """Draw the next work tile. A warp's work."""
        return WorkTileInfo(self.ctas + draw(tile_counter, lane))

    @cute.jit
    def coordinates(self, number):
        """(query, first head) of a work tile."""
        query, head_tile = divmod(number, self.head_tiles)
        return query, head_tile * HEADS
