"""Work tiles and shared memory of the kernels that compare a head's two distributions: the attention's and its
indexer's.

A work tile is a head of a q tile: up to 128 consecutive queries of a sequence, one row each. Its keys come in tiles of
64, from the last that a row sees down to the first.

- The scheduler is dynamic and persistent: CTAs draw work tiles from a tile counter in global memory. Of a work tile
  only earlier ones may be waited for: a CTA that has drawn one is running.
- Heads run through all q tiles together, `heads_together` at a time: queries of a sequence follow each other closely in
  time.
- One producer warp draws work tiles, passes their WorkTileInfo to the consumers, and loads by TMA: the queries' rows of
  both kinds, then both kinds of keys of a tile together through a pipeline.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.copies import tile_load
from dsa.cute.fake_tensors import fake, strides
from dsa.cute.pipeline import Pipeline, pipeline_storage, start
from dsa.cute.shared_memory import load_matrices, load_matrices_transposed
from dsa.cute.tile_counter import draw
from dsa.cute.work_tile import WorkTilePipeline, work_tile_storage
from dsa.kernels.training.limits import PER_HEAD_KEY_TILE, Q_TILE

ROWS, KEYS = Q_TILE, PER_HEAD_KEY_TILE
CHUNK = 64  # channels that lie in a row of 128 bytes of shared memory
DTYPE = BFloat16


class WorkTileInfo(NamedTuple):
    """head: -1 behind the last work tile. Row i < rows is query first_q + i and sees keys first_k + j,
    j < visible(seen + step * i) of `length`. before: how many of the `tiles` tiles of keys the queries of the q tile
    before, of the same sequence, saw."""

    head: Int32
    q_tile: Int32
    first_q: Int32
    rows: Int32
    first_k: Int32
    sequence: Int32
    length: Int32
    seen: Int32
    step: Int32
    tiles: Int32
    before: Int32

    @staticmethod
    def last() -> "WorkTileInfo":
        """What comes behind the last work tile."""
        return WorkTileInfo(*(Int32(-1) for _ in WorkTileInfo._fields))

    @cute.jit
    def limit(self, row):
        """How many keys a row sees."""
        number = cutlass.max(cutlass.min(self.seen + self.step * row, self.length), 0)
        return number if row < self.rows else Int32(0)


@dataclass(frozen=True)
class SharedTensors:
    """Rows [128, d] and [128, di], keys [64, d, stage] and [64, di, stage]; the pipelines of rows (one stage) and of
    keys, both kinds together, and of what is known of work tiles."""

    q: cute.Tensor
    q_idx: cute.Tensor
    k: cute.Tensor
    k_idx: cute.Tensor
    rows: Pipeline
    keys: Pipeline
    work_tiles: WorkTilePipeline


@dataclass(frozen=True)
class Loads:
    """TMA loads of rows and keys: atoms, and the tensors [tokens, channels, heads] as they take them."""

    q: cute.CopyAtom
    mq: cute.Tensor
    q_idx: cute.CopyAtom
    mq_idx: cute.Tensor
    k: cute.CopyAtom
    mk: cute.Tensor
    k_idx: cute.CopyAtom
    mk_idx: cute.Tensor


class PerHeadTiles:
    """`dim` and `index_dim` channels, `stages` tiles of keys; `consumers` warps read what is known of work tiles."""

    def __init__(self, dim: int, index_dim: int, stages: int, consumers: int):
        self.dim, self.index_dim, self.stages, self.consumers = dim, index_dim, stages, consumers

    def row_layout(self, dim: int) -> cute.ComposedLayout:
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, KEYS, dim), DTYPE, 1)

    def key_layout(self, dim: int) -> cute.ComposedLayout:
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (ROWS, KEYS, dim), DTYPE, self.stages)

    def storage(self) -> type:
        @cute.struct
        class TileStorage:
            rows: pipeline_storage(1)
            keys: pipeline_storage(self.stages)
            work_tiles: work_tile_storage(WorkTileInfo)
            q: cute.struct.Align[cute.struct.MemRange[DTYPE, ROWS * self.dim], 1024]
            q_idx: cute.struct.Align[cute.struct.MemRange[DTYPE, ROWS * self.index_dim], 1024]
            k: cute.struct.Align[cute.struct.MemRange[DTYPE, KEYS * self.dim * self.stages], 1024]
            k_idx: cute.struct.Align[cute.struct.MemRange[DTYPE, KEYS * self.index_dim * self.stages], 1024]

        return TileStorage

    def shared_tensors(self, storage) -> SharedTensors:
        layouts = *map(self.row_layout, (self.dim, self.index_dim)), *map(self.key_layout, (self.dim, self.index_dim))
        ranges = storage.q, storage.q_idx, storage.k, storage.k_idx
        tensors = [x.get_tensor(layout.outer, swizzle=layout.inner) for x, layout in zip(ranges, layouts)]
        pipelines = Pipeline.of(storage.rows, 1), Pipeline.of(storage.keys, self.stages)
        return SharedTensors(*tensors, *pipelines, WorkTilePipeline.of(storage.work_tiles, WorkTileInfo))

    @cute.jit
    def init(self, shared: SharedTensors, row_consumers: cutlass.Constexpr, key_consumers: cutlass.Constexpr):
        """Barriers: how many warps release the rows and a tile of keys. One thread's work."""
        shared.rows.init(row_consumers)
        shared.keys.init(key_consumers)
        shared.work_tiles.init(self.consumers)

    def loads(self, q: cute.Tensor, k: cute.Tensor, q_idx: cute.Tensor, k_idx: cute.Tensor) -> Loads:
        """q [Tq, H, d], k [Tk, Hk, d], q_idx [Tq, H, di], k_idx [Tk, 1, di]."""
        pairs = []
        for x, layout, rows, dim in (
            (q, self.row_layout(self.dim), ROWS, self.dim),
            (q_idx, self.row_layout(self.index_dim), ROWS, self.index_dim),
            (k, self.key_layout(self.dim), KEYS, self.dim),
            (k_idx, self.key_layout(self.index_dim), KEYS, self.index_dim),
        ):
            by_head = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1]))
            pairs += tile_load(by_head, layout, (rows, dim))
        return Loads(*pairs)

    @cute.jit
    def produce(
        self,
        loads: Loads,
        shared: SharedTensors,
        q_tiles: cute.Tensor,
        tile_counter: cute.Tensor,
        heads,
        heads_together,
        group,
        lane,
    ):
        """The producer warp: all work tiles of this CTA. heads_together: how many heads run through the q tiles
        together, a divisor of `heads`; group: of so many of them the keys are the same head's."""
        index = draw(tile_counter, lane)
        work_state, row_state, key_state = start(), start(), start()
        count = q_tiles.shape[0]
        total = count * heads
        while index < total:
            head = index // (count * heads_together) * heads_together + index % heads_together
            q_tile = index // heads_together % count
            index = draw(tile_counter, lane)
            # Lanes 0 to 7 have the q tile's fields, 8 to 15 those of the one before.
            own = q_tiles[cutlass.max(q_tile - (lane >> 3 & 1), 0), lane & 7]
            fields = [cute.arch.shuffle_sync(own, i) for i in range(8)]
            earlier = [cute.arch.shuffle_sync(own, 8 + i) for i in range(8)]
            if fields[1] > 0:
                tiles, before = self.key_tiles(fields), self.key_tiles(earlier)
                if q_tile == 0 or earlier[7] != fields[7]:
                    before = Int32(0)
                first_q, rows, first_k, length, seen, step, _, sequence = fields
                info = WorkTileInfo(head, q_tile, first_q, rows, first_k, sequence, length, seen, step, tiles, before)
                work_state = shared.work_tiles.publish(work_state, info)
                shared.rows.producer_acquire(row_state, ROWS * (self.dim + self.index_dim) * 2)
                full = shared.rows.producer_barrier(row_state)
                self.copy(loads.q, loads.mq, shared.q, first_q, head, ROWS, 0, 0, full)
                self.copy(loads.q_idx, loads.mq_idx, shared.q_idx, first_q, head, ROWS, 0, 0, full)
                row_state = shared.rows.advance(row_state)
                for n in cutlass.range(tiles, unroll=1):
                    keys_full, stage = shared.keys.producer_barrier(key_state), key_state.stage
                    shared.keys.producer_acquire(key_state, KEYS * (self.dim + self.index_dim) * 2)
                    tile = tiles - 1 - n
                    self.copy(loads.k, loads.mk, shared.k, first_k, head // group, KEYS, tile, stage, keys_full)
                    self.copy(loads.k_idx, loads.mk_idx, shared.k_idx, first_k, 0, KEYS, tile, stage, keys_full)
                    key_state = shared.keys.advance(key_state)
        shared.work_tiles.publish(work_state, WorkTileInfo.last())

    @cute.jit
    def key_tiles(self, fields):
        """Tiles of keys that a q tile sees."""
        _, rows, _, length, seen, step, _, _ = fields
        last = cutlass.max(cutlass.min(seen + step * (rows - 1), length), 0)
        return (last + (KEYS - 1)) >> 6 if rows > 0 else Int32(0)

    @cute.jit
    def copy(self, atom, mx, sx, first, head, rows: cutlass.Constexpr, tile, stage, barrier):
        """Rows first + rows * tile and following of a head to a stage."""
        dim = cute.size(sx, mode=[1])
        gx = cute.local_tile(cute.domain_offset((first, 0), mx[None, None, head]), (rows, dim), (None, 0))
        target, source = cute.nvgpu.cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sx, 0, 2), cute.group_modes(gx, 0, 2)
        )
        cute.copy(atom, source[None, tile], target[None, stage], tma_bar_ptr=barrier)


@cute.jit
def load_step(rows: cute.Tensor, first, step: cutlass.Constexpr, lane):
    """16 rows, from `first` on, of 16 channels of [128, channels]: a warp's four words, as wgmma takes them."""
    row = first + (lane & 15)
    place = ((step % 4 * 2 + (lane >> 4)) ^ (row & 7)) << 4
    return load_matrices(Int32(rows.iterator.toint()) + row * (2 * CHUNK) + place + step // 4 * (ROWS * CHUNK * 2))


@cute.jit
def load_operand(words: cute.Tensor, rows: cute.Tensor, first, lane):
    """All channels of 16 rows."""
    for step in cutlass.range_constexpr(cute.size(words) // 4):
        loaded = load_step(rows, first, step, lane)
        for i in cutlass.range_constexpr(4):
            words[4 * step + i] = loaded[i]


@cute.jit
def load_transposed(words: cute.Tensor, rows: cute.Tensor, chunk: cutlass.Constexpr, warp, lane):
    """A chunk of 64 channels of [128, channels] as the rows of an operand: the warp's 16 channels, all 128 rows."""
    row, vector = (lane >> 4) * 8 + (lane & 7), warp * 2 + (lane >> 3 & 1)
    start = Int32(rows.iterator.toint()) + chunk * (ROWS * CHUNK * 2) + row * (2 * CHUNK) + ((vector ^ (lane & 7)) << 4)
    for step in cutlass.range_constexpr(ROWS // 16):
        loaded = load_matrices_transposed(start + step * (16 * 2 * CHUNK))
        for i in cutlass.range_constexpr(4):
            words[4 * step + i] = loaded[i]


def operand(mma: cute.TiledMma, rows: int, channels: int) -> tuple[cute.Tensor, cute.Tensor]:
    """Registers for an operand in registers: as wgmma takes them, and as words."""
    tensor = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_A((rows, channels)), DTYPE)
    words = cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=Uint32), cute.make_layout(channels // 4))
    return tensor, words


def score_mma(q_rmem: bool) -> cute.TiledMma:
    """Rows [128, channels], 64 of a warpgroup, in registers if `q_rmem`, times keys [64, channels]."""
    major, source = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.warpgroup.OperandSource
    place = source.RMEM if q_rmem else source.SMEM
    shape = (ROWS // 64, 1, 1), (64, KEYS)
    return sm90.make_trivial_tiled_mma(DTYPE, DTYPE, major, major, cutlass.Float32, *shape, place)


@cute.jit
def multiply(mma: cute.TiledMma, acc: cute.Tensor, rows: cute.Tensor, columns: cute.Tensor, fresh: cutlass.Constexpr):
    """Issue acc = rows times columns, as a group of wgmma instructions; if not `fresh`, what `mma` is set to."""
    for step in cutlass.range_constexpr(cute.size(rows, mode=[2])):
        if const_expr(fresh):
            mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
        cute.gemm(mma, acc, rows[None, None, step], columns[None, None, step], acc)
    cute.nvgpu.warpgroup.commit_group()


def fake_inputs(tokens, keys, heads, dim: int, index_dim: int) -> tuple[cute.Tensor, ...]:
    """q [Tq, H, d], k [Tk, Hk, d], q_idx [Tq, H, di], k_idx [Tk, 1, di]: rows start at multiples of 16 bytes."""
    shapes = (tokens, heads, dim), (keys, cute.sym_int(), dim), (tokens, heads, index_dim), (keys, 1, index_dim)
    return tuple(fake_rows(shape) for shape in shapes)


def fake_rows(shape: tuple) -> cute.Tensor:
    return fake(DTYPE, shape, (*strides(2, 8), 1))


def fake_by_query(tokens, heads) -> cute.Tensor:
    """fp32 [Tq, H]"""
    return fake(Float32, (tokens, heads), (*strides(1), 1), 4)


def fake_by_head(heads, tokens) -> cute.Tensor:
    """fp32 [H, Tq]"""
    return fake(Float32, (heads, tokens), (*strides(1), 1), 4)
