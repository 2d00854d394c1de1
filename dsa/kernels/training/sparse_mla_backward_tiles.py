"""What the roles of the sparse MLA backward kernel share: its sizes, shared memory, barriers and the tile scheduler.

A work tile is 64 heads of a query, with all of the query's keys, which come in tiles of 64.
"""

from dataclasses import dataclass
from enum import IntEnum

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.sm90 import WARP, WARPGROUP
from dsa.kernels.training.limits import MLA_V_CHANNELS, SPARSE_HEAD_TILE, SPARSE_KEY_TILE

TILE, HEADS = SPARSE_KEY_TILE, SPARSE_HEAD_TILE
CHUNK = 64  # channels
VALUE = MLA_V_CHANNELS
CHUNKS = VALUE // CHUNK
HALF = VALUE // 2
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
    def score_order(self) -> list[int | str]:
        """The chunks of a key tile in the order in which they arrive and are multiplied: halves, each with its half of
        the rope part."""
        return [0, 1, 2, 3, "rope0", 4, 5, 6, 7, "rope1"] if self.rope else list(range(CHUNKS))


@dataclass(frozen=True)
class SharedTensors:
    """k: chunks of 64 channels [64, 64, 8], its rope part k_rope [64, 32, 2]; k_half [64, 256, 2] is the same memory as
    k. q, do: strips [64, 64, 8], or of 32 channels with q's rope part behind the others [64, 32, 18 and 16]. ds [keys,
    heads, 2]: of each consumer warpgroup's tiles. head_terms: the address of l / ln 2 and e of each head. key_rows [64,
    KEY_ROW_STAGES]: the row of kv of each of a tile's keys, -1 for none. work_tiles [2]: the numbers of the current
    work tile and of the next one."""

    k: cute.Tensor
    k_rope: cute.Tensor
    k_half: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    head_terms: Int32
    key_rows: cute.Tensor
    work_tiles: cute.Tensor


@dataclass(frozen=True)
class Barriers:
    """tile_full, tile_empty: of each of the two stages for a work tile's number. q_full, q_empty: of each chunk of Q
    and dO, and of Q's rope part. k_full: of each chunk and each half of the rope part. k_empty: of each half of the
    channels. ds_full: dS of a key tile."""

    tile_full: cute.Pointer
    tile_empty: cute.Pointer
    q_full: cute.Pointer
    q_empty: cute.Pointer
    k_full: cute.Pointer
    k_empty: cute.Pointer
    ds_full: cute.Pointer

    @cute.jit
    def init(self):
        """One thread's work."""
        for i in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(self.tile_full + i, 1)
            cute.arch.mbarrier_init(self.tile_empty + i, THREADS // WARP)
        for i in cutlass.range_constexpr(CHUNKS + 1):
            cute.arch.mbarrier_init(self.q_full + i, 1)
            cute.arch.mbarrier_init(self.q_empty + i, CONSUMER_WARPS)
        for i in cutlass.range_constexpr(CHUNKS + 2):
            # With the first chunk the producer warps also say which keys there are.
            cute.arch.mbarrier_init(self.k_full + i, WARPGROUP + 4 if i == 0 else WARPGROUP)
        for i in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(self.k_empty + i, 4)
        cute.arch.mbarrier_init(self.ds_full, 4)


@dataclass(frozen=True)
class TileScheduler:
    """A dynamic persistent scheduler: each CTA begins with the work tile of its own number, and draws the next one
    from a tile counter in global memory while it works. Its producer passes the number on in a pipeline of two stages
    in shared memory.

    work_tiles, key_tiles: how many there are, of all queries and of one query; head_tiles: blocks of 64 heads
    """

    work_tiles: Int32
    key_tiles: Int32
    ctas: Int32
    head_tiles: cute.FastDivmodDivisorV2

    @cute.jit
    def coordinates(self, number):
        """(query, first head) of a work tile."""
        query, head_tile = divmod(number, self.head_tiles)
        return query, head_tile * HEADS

    @cute.jit
    def draw(self, tile_counter: cute.Tensor, lane):
        """The number of the next work tile: `work_tiles` or more if there is none left. Lane 0 has it."""
        number = Int32(0)
        if lane == 0:
            number = self.ctas + cute.arch.atomic_add(tile_counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        return number

    @cute.jit
    def publish(self, shared: SharedTensors, barriers: Barriers, number, turn, lane):
        """Tell all warps the number of the CTA's work tile of a turn, which lane 0 has. A producer warp's work."""
        stage = turn & 1
        cute.arch.mbarrier_wait(barriers.tile_empty + stage, ((turn >> 1) & 1) ^ 1)
        if lane == 0:
            shared.work_tiles[stage] = number
            cute.arch.mbarrier_arrive(barriers.tile_full + stage)

    @cute.jit
    def current(self, shared: SharedTensors, barriers: Barriers, turn):
        """The number of the work tile of a turn."""
        cute.arch.mbarrier_wait(barriers.tile_full + (turn & 1), (turn >> 1) & 1)
        return shared.work_tiles[turn & 1]

    @cute.jit
    def release(self, barriers: Barriers, turn):
        """This warp needs the number no more."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barriers.tile_empty + (turn & 1))
