"""Work and memory of the kernels that compare a head's two distributions: the attention's and its indexer's.

An item is a head of a slot: up to 128 consecutive queries of a sequence, one row each. Its keys come in tiles of 64,
from the last that a row sees down to the first.

- CTAs take items from a counter in global memory, so whoever is done first takes the next. Of an item only earlier ones
  may be waited for: a CTA that has taken one is running.
- Heads come in bunches, and a bunch runs through all slots: queries of a sequence follow each other closely in time.
- One warp takes items, tells the others about them, and loads: the queries' rows of both kinds, then both kinds of keys
  of a tile together through a ring.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, Uint32, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import advance
from dsa.cute.shared_memory import load_matrices

ROWS, KEYS = 128, 64
WARPGROUP = 128
SHARED_BYTES = 232448
CHUNK = 64  # channels that lie in a row of 128 bytes of shared memory
FACTS = 2
# What an item's facts are; HEAD is -1 behind the last item. BEFORE: tiles of the slot before, of the same sequence.
HEAD, SLOT, FIRST_Q, COUNT, FIRST_K, SEQUENCE, LENGTH, SEEN, STEP, TILES, BEFORE = range(11)
FACT_WORDS = 12
DTYPE = BFloat16


@dataclass(frozen=True)
class Item:
    """Row i < count is query first_q + i and sees keys first_k + j, j < visible(seen + step * i) of `length`. `before`:
    how many of the `tiles` tiles of keys the queries before this slot's saw."""

    head: Int32
    slot: Int32
    first_q: Int32
    count: Int32
    first_k: Int32
    sequence: Int32
    length: Int32
    seen: Int32
    step: Int32
    tiles: Int32
    before: Int32

    @cute.jit
    def limit(self, row):
        """How many keys a row sees."""
        number = cutlass.max(cutlass.min(self.seen + self.step * row, self.length), 0)
        return number if row < self.count else Int32(0)


@dataclass(frozen=True)
class Memory:
    """Shared memory: rows [128, d] and [128, di], keys [64, d, stage] and [64, di, stage], barriers and facts."""

    q: cute.Tensor
    q_idx: cute.Tensor
    k: cute.Tensor
    k_idx: cute.Tensor
    q_full: cute.Pointer
    q_empty: cute.Pointer
    full: cute.Pointer
    empty: cute.Pointer
    facts_full: cute.Pointer
    facts_empty: cute.Pointer
    facts: cute.Tensor


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
    """`dim` and `index_dim` channels, a ring of `stages` tiles of keys; `readers` warps read facts."""

    def __init__(self, dim: int, index_dim: int, stages: int, readers: int):
        self.dim, self.index_dim, self.stages, self.readers = dim, index_dim, stages, readers

    def row_layout(self, dim: int) -> cute.ComposedLayout:
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, KEYS, dim), DTYPE, 1)

    def key_layout(self, dim: int) -> cute.ComposedLayout:
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (ROWS, KEYS, dim), DTYPE, self.stages)

    def storage(self) -> type:
        @cute.struct
        class TileStorage:
            q_full: cute.struct.MemRange[Int64, 1]
            q_empty: cute.struct.MemRange[Int64, 1]
            full: cute.struct.MemRange[Int64, self.stages]
            empty: cute.struct.MemRange[Int64, self.stages]
            facts_full: cute.struct.MemRange[Int64, FACTS]
            facts_empty: cute.struct.MemRange[Int64, FACTS]
            facts: cute.struct.MemRange[Int32, FACT_WORDS * FACTS]
            q: cute.struct.Align[cute.struct.MemRange[DTYPE, ROWS * self.dim], 1024]
            q_idx: cute.struct.Align[cute.struct.MemRange[DTYPE, ROWS * self.index_dim], 1024]
            k: cute.struct.Align[cute.struct.MemRange[DTYPE, KEYS * self.dim * self.stages], 1024]
            k_idx: cute.struct.Align[cute.struct.MemRange[DTYPE, KEYS * self.index_dim * self.stages], 1024]

        return TileStorage

    def memory(self, storage) -> Memory:
        layouts = *map(self.row_layout, (self.dim, self.index_dim)), *map(self.key_layout, (self.dim, self.index_dim))
        ranges = storage.q, storage.q_idx, storage.k, storage.k_idx
        tensors = [x.get_tensor(layout.outer, swizzle=layout.inner) for x, layout in zip(ranges, layouts)]
        barriers = storage.q_full, storage.q_empty, storage.full, storage.empty, storage.facts_full, storage.facts_empty
        facts = storage.facts.get_tensor(cute.make_layout((FACT_WORDS, FACTS)))
        return Memory(*tensors, *[x.data_ptr() for x in barriers], facts)

    @cute.jit
    def init(self, memory: Memory, row_readers: cutlass.Constexpr, key_readers: cutlass.Constexpr):
        """Barriers: how many warps release the rows and a tile of keys. One thread's work."""
        cute.arch.mbarrier_init(memory.q_full, 1)
        cute.arch.mbarrier_init(memory.q_empty, row_readers)
        for i in cutlass.range_constexpr(self.stages):
            cute.arch.mbarrier_init(memory.full + i, 1)
            cute.arch.mbarrier_init(memory.empty + i, key_readers)
        for i in cutlass.range_constexpr(FACTS):
            cute.arch.mbarrier_init(memory.facts_full + i, 1)
            cute.arch.mbarrier_init(memory.facts_empty + i, self.readers)

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
            load = cute.nvgpu.cpasync.CopyBulkTensorTileG2SOp()
            stage = cute.slice_(layout, (None, None, 0))
            info = cute.nvgpu.cpasync.make_tiled_tma_atom(load, by_head, stage, (rows, dim))
            pairs += [info[0], info[1]]
        return Loads(*pairs)

    @cute.jit
    def load(self, loads: Loads, memory: Memory, slots: cute.Tensor, counter: cute.Tensor, heads, bunch, group, lane):
        """The loading warp: all items of this CTA. bunch: heads that run through the slots together, a divisor of
        `heads`; group: of so many of them the keys are the same head's."""
        index = self.take(counter, lane)
        at, facts_phase, rows_phase, stage, phase = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        count = slots.shape[0]
        total = count * heads
        while index < total:
            head = index // (count * bunch) * bunch + index % bunch
            slot = index // bunch % count
            index = self.take(counter, lane)
            # Lanes 0 to 7 have the slot's numbers, 8 to 15 those of the one before.
            own = slots[cutlass.max(slot - (lane >> 3 & 1), 0), lane & 7]
            numbers = [cute.arch.shuffle_sync(own, i) for i in range(8)]
            earlier = [cute.arch.shuffle_sync(own, 8 + i) for i in range(8)]
            if numbers[1] > 0:
                tiles, before = self.tiles(numbers), self.tiles(earlier)
                if slot == 0 or earlier[7] != numbers[7]:
                    before = Int32(0)
                cute.arch.mbarrier_wait(memory.facts_empty + at, facts_phase ^ 1)
                with cute.arch.elect_one():
                    first_q, rows, first_k, length, seen, step, _, sequence = numbers
                    facts = (head, slot, first_q, rows, first_k, sequence, length, seen, step, tiles, before)
                    for i in cutlass.range_constexpr(len(facts)):
                        memory.facts[i, at] = facts[i]
                    cute.arch.mbarrier_arrive(memory.facts_full + at)
                at, facts_phase = advance(at, facts_phase, FACTS)
                cute.arch.mbarrier_wait(memory.q_empty, rows_phase ^ 1)
                with cute.arch.elect_one():
                    size = ROWS * (self.dim + self.index_dim) * 2
                    cute.arch.mbarrier_arrive_and_expect_tx(memory.q_full, size)
                self.copy(loads.q, loads.mq, memory.q, numbers[0], head, ROWS, 0, 0, memory.q_full)
                self.copy(loads.q_idx, loads.mq_idx, memory.q_idx, numbers[0], head, ROWS, 0, 0, memory.q_full)
                rows_phase ^= 1
                for n in cutlass.range(tiles, unroll=1):
                    full = memory.full + stage
                    cute.arch.mbarrier_wait(memory.empty + stage, phase ^ 1)
                    with cute.arch.elect_one():
                        size = KEYS * (self.dim + self.index_dim) * 2
                        cute.arch.mbarrier_arrive_and_expect_tx(full, size)
                    tile = tiles - 1 - n
                    self.copy(loads.k, loads.mk, memory.k, numbers[2], head // group, KEYS, tile, stage, full)
                    self.copy(loads.k_idx, loads.mk_idx, memory.k_idx, numbers[2], 0, KEYS, tile, stage, full)
                    stage, phase = advance(stage, phase, self.stages)
        cute.arch.mbarrier_wait(memory.facts_empty + at, facts_phase ^ 1)
        with cute.arch.elect_one():
            memory.facts[HEAD, at] = Int32(-1)
            cute.arch.mbarrier_arrive(memory.facts_full + at)

    @cute.jit
    def take(self, counter: cute.Tensor, lane):
        """The number of the next item."""
        number = Int32(0)
        if lane == 0:
            number = cute.arch.atomic_add(counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        return cute.arch.shuffle_sync(number, 0)

    @cute.jit
    def tiles(self, numbers):
        """Tiles of keys that a slot sees."""
        _, rows, _, length, seen, step, _, _ = numbers
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
    def next_item(self, memory: Memory, count) -> Item:
        """Wait for the facts of a warp's item number `count`."""
        cute.arch.mbarrier_wait(memory.facts_full + count % FACTS, count // FACTS % 2)
        return self.item(memory, count)

    @cute.jit
    def item(self, memory: Memory, count) -> Item:
        """The facts again, where registers should not hold them."""
        return Item(*[memory.facts[i, count % FACTS] for i in range(11)])

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """A warp needs what is behind a barrier no more."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)


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


@cute.jit
def load_matrices_transposed(address: Int32):
    """As `load_matrices`; what a lane has of each matrix are two neighbours of its column lane / 4."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {" + "{$w0}, {$w1}, {$w2}, {$w3}" + "}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def operand(mma: cute.TiledMma, rows: int, channels: int) -> tuple[cute.Tensor, cute.Tensor]:
    """Registers for an operand in registers: as wgmma takes them, and as words."""
    tensor = cute.make_rmem_tensor(mma.get_slice(0).partition_shape_A((rows, channels)), DTYPE)
    words = cute.make_tensor(cute.recast_ptr(tensor.iterator, dtype=Uint32), cute.make_layout(channels // 4))
    return tensor, words


def score_mma(held: bool) -> cute.TiledMma:
    """Rows [128, channels], 64 of a warpgroup, in registers if `held`, times keys [64, channels]."""
    major, source = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.warpgroup.OperandSource
    held_in = source.RMEM if held else source.SMEM
    shape = (ROWS // 64, 1, 1), (64, KEYS)
    return sm90.make_trivial_tiled_mma(DTYPE, DTYPE, major, major, cutlass.Float32, *shape, held_in)


@cute.jit
def multiply(mma: cute.TiledMma, acc: cute.Tensor, rows: cute.Tensor, columns: cute.Tensor, fresh: cutlass.Constexpr):
    """Issue acc = rows times columns, as a group of wgmma instructions; if not `fresh`, what `mma` is set to."""
    for step in cutlass.range_constexpr(cute.size(rows, mode=[2])):
        if const_expr(fresh):
            mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
        cute.gemm(mma, acc, rows[None, None, step], columns[None, None, step], acc)
    cute.nvgpu.warpgroup.commit_group()
