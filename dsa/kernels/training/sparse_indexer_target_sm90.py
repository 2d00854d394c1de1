"""The sparse stage's indexer loss: KL of the attention's and the indexer's distributions over each query's keys.

p[j] = sum_h exp(scale q_h . kv[j] - lse_h), over its sum;  I[j] = sum_i w_i relu(q_idx_i . k_idx[j])
kl = sum_j p[j] log(p[j] / softmax(I)[j]);  d_scores[j] = softmax(I)[j] - p[j], for j of a query's selected keys

Plan
- A CTA takes whole queries in turns, and runs through tiles of 64 of a query's keys. Rows of the products are heads, so
  that each lane has the LSEs and weights of its two rows as numbers; Q is in registers (HELD chunks of 64 channels, the
  rest in shared memory), and only keys are read from shared memory.
- Two warpgroups have the attention's heads: 64 each and every tile, or, if there are no more than 64, all heads and
  tiles in turns. While one takes exponentials the other multiplies. Their sums over a warp's 16 heads go to a ring.
- The third has the indexer's scores of every tile, adds up the others' sums, and at a query's end normalises, reduces
  and stores, while the next query is already multiplied.
- The fourth gathers, 16 bytes a lane: keys in a ring of chunks, index keys in a ring of tiles. A query's own rows come
  by the same rings before its keys.
- Exponents are raised by RAISED: heads whose keys all lie far below their LSE (of a window and a sink as well) still
  count up to e^-130.
Shared memory: rings, the free chunks of Q, the sums' ring, p and I of a query.
Registers: ATTENTION_REGISTERS x 2 + INDEX_REGISTERS + LOADER_REGISTERS = 512 a lane.
Constraints: bf16; 576 or 512 channels, up to 128 heads; up to 64 index heads of 64 or 128 channels; MOST_KEYS keys.
Roofline: of a tile of 128 heads x 576 and 64 index heads x 128 wgmma takes 2560 clocks, shared memory 2240. Measured
4190, and 3200 of 64 heads, where attention's forward takes 3140 and gathers four fifths as much: 0.65 to 0.72 of that
forward's time with 128 heads, 0.82 to 1.21 with 64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.copies import arrive_when_gathered
from dsa.cute.pipeline import advance
from dsa.cute.shared_memory import load_matrices, pack, swizzled
from dsa.cute.sm90 import opaque
from dsa.kernels.training.gathered_rows import (
    CHUNK,
    CHUNK_BYTES,
    TILE,
    chunk_layout,
    gather_chunk,
    own_rows,
    row_addresses,
    selected,
)
from dsa.kernels.training.lane_sums import sum_rows

WARPGROUP = 128
THREADS = 4 * WARPGROUP
ATTENTION_REGISTERS, INDEX_REGISTERS, LOADER_REGISTERS = 176, 112, 48
HELD = 7
SLOTS = {576: 17, 512: 19}  # of chunks of keys
INDEX_SLOTS = 2
SUM_SLOTS = 4
GROUP = 3  # chunks multiplied before those before them are given back
MOST_KEYS = 2048
STEPS = CHUNK // 16
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
RAISED = 60.0  # powers of two: 2^60 x 128 heads x MOST_KEYS is finite
NOTHING = -3e38  # finite, so that a difference to it is no NaN
SMALLEST = 2.0**-126
INFINITY = float("inf")
INDEX_BARRIER, ATTENTION_BARRIER = 1, 2


@dataclass(frozen=True)
class Rings:
    """Pointers are to barriers, one for each slot.

    sums        [64 keys, 8 warps, SUM_SLOTS]: a tile's sums of exponentials over the heads of each attention warp
    own_sums    [64 keys, 4 warps, 2]: of the index scores
    target, scores  [MOST_KEYS]: p before its normalisation, and I
    parts       [12]: what the index warps tell each other at a query's end
    """

    keys_full: cute.Pointer
    keys_empty: cute.Pointer
    index_full: cute.Pointer
    index_empty: cute.Pointer
    sums_full: cute.Pointer
    sums_empty: cute.Pointer
    sums: cute.Tensor
    own_sums: cute.Tensor
    target: cute.Tensor
    scores: cute.Tensor
    parts: cute.Tensor


@dataclass(frozen=True)
class Inputs:
    """q [T, H, d], kv [Tk, d], q_idx [T, Hi, di], k_idx [Tk, di], w_idx [T, Hi], indices [T, K], lse [T, H]"""

    q: cute.Tensor
    kv: cute.Tensor
    q_idx: cute.Tensor
    k_idx: cute.Tensor
    w_idx: cute.Tensor
    indices: cute.Tensor
    lse: cute.Tensor


@dataclass(frozen=True)
class Work:
    """This CTA's queries are first, first + step and so on below `queries`; tiles of keys of each."""

    first: Int32
    step: Int32
    queries: Int32
    tiles: Int32


class SparseIndexerTargetSm90:
    """Keys of `channels` numbers, `row_tiles` (1 or 2) times 64 heads; index keys of `index_channels`."""

    def __init__(self, channels: int, row_tiles: int, index_channels: int):
        self.channels, self.row_tiles, self.index_channels = channels, row_tiles, index_channels
        self.chunks, self.index_chunks = channels // CHUNK, index_channels // CHUNK
        self.free = self.chunks - HELD
        self.slots, self.index_slots = SLOTS[channels], INDEX_SLOTS

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        q_idx: cute.Tensor,
        k_idx: cute.Tensor,
        w_idx: cute.Tensor,
        indices: cute.Tensor,
        lse: cute.Tensor,
        kl: cute.Tensor,
        d_scores: cute.Tensor,
        scale: Float32,
        ctas: Int32,
        stream,
    ):
        k_major, registers = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.warpgroup.OperandSource.RMEM
        make, kinds, shape = sm90.make_trivial_tiled_mma, (BFloat16, BFloat16, k_major, k_major), (TILE, TILE)
        free_mma = make(*kinds, Float32, (1, 1, 1), shape)
        held_mma = make(*kinds, Float32, (1, 1, 1), shape, registers)
        keys_layout = chunk_layout(BFloat16, self.slots)
        index_layout = chunk_layout(BFloat16, self.index_slots * self.index_chunks)
        q_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (TILE, TILE, CHUNK), BFloat16, self.free * 2)

        @cute.struct
        class Storage:
            keys_full: cute.struct.MemRange[Int64, self.slots]
            keys_empty: cute.struct.MemRange[Int64, self.slots]
            index_full: cute.struct.MemRange[Int64, self.index_slots]
            index_empty: cute.struct.MemRange[Int64, self.index_slots]
            sums_full: cute.struct.MemRange[Int64, SUM_SLOTS]
            sums_empty: cute.struct.MemRange[Int64, SUM_SLOTS]
            parts: cute.struct.MemRange[Float32, 12]
            keys: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(keys_layout)], 1024]
            index: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(index_layout)], 1024]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, TILE * 8 * SUM_SLOTS], 16]
            own_sums: cute.struct.Align[cute.struct.MemRange[Float32, TILE * 4 * 2], 16]
            target: cute.struct.Align[cute.struct.MemRange[Float32, MOST_KEYS], 16]
            scores: cute.struct.Align[cute.struct.MemRange[Float32, MOST_KEYS], 16]

        assert Storage.size_in_bytes() <= 232448
        self.storage = Storage
        inputs = Inputs(q, kv, q_idx, k_idx, w_idx, indices, lse)
        self.kernel(inputs, kl, d_scores, scale, free_mma, held_mma, keys_layout, index_layout, q_layout).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        inputs: Inputs,
        kl: cute.Tensor,
        d_scores: cute.Tensor,
        scale: Float32,
        free_mma: cute.TiledMma,
        held_mma: cute.TiledMma,
        keys_layout: cute.ComposedLayout,
        index_layout: cute.ComposedLayout,
        q_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        storage = SmemAllocator().allocate(self.storage)
        keys = storage.keys.get_tensor(keys_layout.outer, swizzle=keys_layout.inner)
        index = storage.index.get_tensor(index_layout.outer, swizzle=index_layout.inner)
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        rings = Rings(
            storage.keys_full.data_ptr(),
            storage.keys_empty.data_ptr(),
            storage.index_full.data_ptr(),
            storage.index_empty.data_ptr(),
            storage.sums_full.data_ptr(),
            storage.sums_empty.data_ptr(),
            storage.sums.get_tensor(cute.make_layout((TILE, 8, SUM_SLOTS))),
            storage.own_sums.get_tensor(cute.make_layout((TILE, 4, 2))),
            storage.target.get_tensor(cute.make_layout(MOST_KEYS)),
            storage.scores.get_tensor(cute.make_layout(MOST_KEYS)),
            storage.parts.get_tensor(cute.make_layout(12)),
        )
        if tid == 0:
            self.init(rings)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        work = Work(first, step, inputs.q.shape[0], (inputs.indices.shape[1] + TILE - 1) // TILE)
        if warp >= 12:
            cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            self.load(inputs, rings, keys, index, work, warp - 12, lane)
        elif warp >= 8:
            cute.arch.setmaxregister_decrease(INDEX_REGISTERS)
            self.index(inputs, rings, kl, d_scores, held_mma, index, work, warp - 8, lane)
        else:
            cute.arch.setmaxregister_increase(ATTENTION_REGISTERS)
            self.attend(inputs, rings, free_mma, held_mma, keys, sq, scale, work, warp // 4, warp % 4, lane)

    @cute.jit
    def init(self, rings: Rings):
        """Barriers: lanes that gather fill a slot, warps empty it. One thread's work."""
        for i in cutlass.range_constexpr(self.slots):
            cute.arch.mbarrier_init(rings.keys_full + i, WARPGROUP)
            cute.arch.mbarrier_init(rings.keys_empty + i, 8)
        for i in cutlass.range_constexpr(self.index_slots):
            cute.arch.mbarrier_init(rings.index_full + i, WARPGROUP)
            cute.arch.mbarrier_init(rings.index_empty + i, 4)
        for i in cutlass.range_constexpr(SUM_SLOTS):
            cute.arch.mbarrier_init(rings.sums_full + i, 4 * self.row_tiles)
            cute.arch.mbarrier_init(rings.sums_empty + i, 4)

    @cute.jit
    def load(self, inputs: Inputs, rings: Rings, keys, index, work: Work, warp, lane):
        """The gathering warpgroup."""
        keys_start, index_start = Int32(keys.iterator.toint()), Int32(index.iterator.toint())
        count = inputs.kv.shape[0]
        rows = own_rows(warp, lane)
        slot, phase, own, own_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        for query in cutlass.range(work.first, work.queries, work.step, unroll=1):
            for part in cutlass.range_constexpr(self.row_tiles):
                heads = []
                for row in rows:
                    head = part * TILE + row
                    heads.append(head if head < inputs.q.shape[1] else Int32(-1))
                row = inputs.q[query, None, None]
                sources, keep = row_addresses(Int64(row.iterator.toint()), 2 * Int64(row.stride[0]), heads, lane)
                slot, phase = self.load_chunks(rings, keys_start, sources, keep, slot, phase, warp, lane)
            heads = []
            for row in rows:
                heads.append(row if row < inputs.q_idx.shape[1] else Int32(-1))
            row = inputs.q_idx[query, None, None]
            sources, keep = row_addresses(Int64(row.iterator.toint()), 2 * Int64(row.stride[0]), heads, lane)
            own, own_phase = self.load_index(rings, index_start, sources, keep, own, own_phase, warp, lane)
            found = selected(inputs.indices[query, None], Int32(0), rows, count)
            for tile in cutlass.range(work.tiles, unroll=1):
                start, stride = Int64(inputs.kv.iterator.toint()), 2 * Int64(inputs.kv.stride[0])
                sources, keep = row_addresses(start, stride, found, lane)
                start, stride = Int64(inputs.k_idx.iterator.toint()), 2 * Int64(inputs.k_idx.stride[0])
                index_sources, _ = row_addresses(start, stride, found, lane)
                # The next tile's indices are on their way while these keys are asked for.
                found = selected(inputs.indices[query, None], (tile + 1) * TILE, rows, count)
                slot, phase = self.load_chunks(rings, keys_start, sources, keep, slot, phase, warp, lane)
                own, own_phase = self.load_index(rings, index_start, index_sources, keep, own, own_phase, warp, lane)

    @cute.jit
    def load_chunks(self, rings: Rings, start: Int32, sources, keep, slot, phase, warp, lane):
        for chunk in cutlass.range_constexpr(self.chunks):
            cute.arch.mbarrier_wait(rings.keys_empty + slot, phase ^ 1)
            gather_chunk(start + slot * CHUNK_BYTES, sources, keep, chunk, warp, lane)
            arrive_when_gathered(rings.keys_full + slot)
            slot, phase = advance(slot, phase, self.slots)
        return slot, phase

    @cute.jit
    def load_index(self, rings: Rings, start: Int32, sources, keep, slot, phase, warp, lane):
        cute.arch.mbarrier_wait(rings.index_empty + slot, phase ^ 1)
        for chunk in cutlass.range_constexpr(self.index_chunks):
            target = start + (slot * self.index_chunks + chunk) * CHUNK_BYTES
            gather_chunk(target, sources, keep, chunk, warp, lane)
        arrive_when_gathered(rings.index_full + slot)
        return advance(slot, phase, self.index_slots)

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """This warp has read the slot."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def take_operand(self, words, chunk: cutlass.Constexpr, source: cute.Pointer, warp, lane):
        """A chunk of 64 rows in shared memory to a warp's registers, as the first operand: words [4, STEPS, chunks]."""
        for step in cutlass.range_constexpr(STEPS):
            address = source + swizzled(warp * 16 + (lane & 15), 2 * step + (lane >> 4))
            for i, word in enumerate(load_matrices(Int32(address.toint()))):
                words[i, step, chunk] = word

    @cute.jit
    def attend(self, inputs: Inputs, rings: Rings, free_mma, held_mma, keys, sq, scale, work: Work, side, warp, lane):
        """An attention warpgroup, number `side`: sums over heads of exponentials."""
        tid = warp * 32 + lane
        thr = free_mma.get_slice(tid)
        rq = free_mma.make_fragment_A(thr.partition_A(sq))
        rk = free_mma.make_fragment_B(thr.partition_B(keys))
        held = cute.make_rmem_tensor((*held_mma.get_slice(tid).partition_shape_A((TILE, CHUNK)), HELD), BFloat16)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE, TILE)), Float32)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(TILE // 2))
        offsets = cute.make_rmem_tensor((2,), Float32)
        slot, phase, tiles = Int32(0), Int32(0), Int32(0)
        for query in cutlass.range(work.first, work.queries, work.step, unroll=1):
            for r in cutlass.range_constexpr(2):
                head = warp * 16 + (lane >> 2) + 8 * r
                if const_expr(self.row_tiles == 2):
                    head += side * TILE
                offsets[r] = -Float32(INFINITY)
                if head < inputs.q.shape[1]:
                    offsets[r] = RAISED - inputs.lse[query, head] * LOG2E
            for part in cutlass.range_constexpr(self.row_tiles):
                slot, phase = self.take_query(rings, held, keys, sq, slot, phase, part, side, warp, lane)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=ATTENTION_BARRIER + side, number_of_threads=WARPGROUP)
            if const_expr(self.row_tiles == 2):
                for tile in cutlass.range(work.tiles, unroll=1):
                    slot, phase = self.multiply(acc, free_mma, held_mma, held, rq, rk, rings, slot, phase, side)
                    self.sum_heads(flat, offsets, rings, scale, tiles + tile, side * 4 + warp, lane)
            else:
                if side == 1 and work.tiles > 0:
                    slot, phase = self.pass_over(rings, slot, phase)
                for tile in cutlass.range(side, work.tiles, 2, unroll=1):
                    slot, phase = self.multiply(acc, free_mma, held_mma, held, rq, rk, rings, slot, phase, side)
                    self.sum_heads(flat, offsets, rings, scale, tiles + tile, warp, lane)
                    if tile + 1 < work.tiles:
                        slot, phase = self.pass_over(rings, slot, phase)
            tiles += work.tiles

    @cute.jit
    def take_query(self, rings: Rings, held, keys, sq, slot, phase, part: cutlass.Constexpr, side, warp, lane):
        """64 rows of the query, if they are this warpgroup's, to registers and shared memory."""
        words = cute.make_tensor(cute.recast_ptr(held.iterator, dtype=Uint32), cute.make_layout((4, STEPS, HELD)))
        target = cute.recast_ptr(sq.iterator, cute.make_swizzle(0, 4, 3), dtype=BFloat16)
        source = cute.recast_ptr(keys.iterator, cute.make_swizzle(0, 4, 3), dtype=BFloat16)
        vector = cute.make_rmem_tensor((8,), BFloat16)
        for chunk in cutlass.range_constexpr(self.chunks):
            cute.arch.mbarrier_wait(rings.keys_full + slot, phase)
            if self.row_tiles == 1 or side == part:
                memory = source + slot * (TILE * CHUNK)
                if const_expr(chunk < HELD):
                    self.take_operand(words, chunk, memory, warp, lane)
                else:
                    # A warp's own rows.
                    place = target + (side * self.free + chunk - HELD) * (TILE * CHUNK)
                    for i in cutlass.range_constexpr(TILE * CHUNK // (8 * WARPGROUP)):
                        here = (warp * (TILE * CHUNK // 32) + i * 32 + lane) * 8
                        cute.autovec_copy(cute.make_tensor(memory + here, cute.make_layout(8)), vector)
                        cute.autovec_copy(vector, cute.make_tensor(place + here, cute.make_layout(8)))
            cute.arch.sync_warp()
            self.release(rings.keys_empty + slot)
            slot, phase = advance(slot, phase, self.slots)
        return slot, phase

    @cute.jit
    def pass_over(self, rings: Rings, slot, phase):
        """A tile of the other warpgroup's: all wait for every slot, so that phases are not taken for each other."""
        for _ in cutlass.range_constexpr(self.chunks):
            cute.arch.mbarrier_wait(rings.keys_full + slot, phase)
            self.release(rings.keys_empty + slot)
            slot, phase = advance(slot, phase, self.slots)
        return slot, phase

    @cute.jit
    def multiply(self, acc, free_mma, held_mma, held, rq, rk, rings: Rings, slot, phase, side):
        """acc = Q K^T of the next tile, as its chunks arrive; each group's slots are given back behind the next one."""
        given = slot
        cute.nvgpu.warpgroup.fence()
        for chunk in cutlass.range_constexpr(self.chunks):
            cute.arch.mbarrier_wait(rings.keys_full + slot, phase)
            own = opaque(slot)
            for step in cutlass.range_constexpr(STEPS):
                if const_expr(chunk < HELD):
                    held_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, chunk + step > 0)
                    cute.gemm(held_mma, acc, held[None, None, step, chunk], rk[None, None, step, own], acc)
                else:
                    free_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
                    queries = rq[None, None, step, side * self.free + chunk - HELD]
                    cute.gemm(free_mma, acc, queries, rk[None, None, step, own], acc)
            slot, phase = advance(slot, phase, self.slots)
            if const_expr(chunk % GROUP == GROUP - 1 or chunk == self.chunks - 1):
                cute.nvgpu.warpgroup.commit_group()
                if const_expr(chunk >= GROUP):
                    cute.nvgpu.warpgroup.wait_group(1)
                    for _ in cutlass.range_constexpr(GROUP):
                        self.release(rings.keys_empty + given)
                        given, _ = advance(given, Int32(0), self.slots)
        cute.nvgpu.warpgroup.wait_group(0)
        for _ in cutlass.range_constexpr((self.chunks - 1) % GROUP + 1):
            self.release(rings.keys_empty + given)
            given, _ = advance(given, Int32(0), self.slots)
        return slot, phase

    def sums_slot(self, tile):
        """(slot, phase) of the sums' ring for the tile number `tile` of all."""
        return tile & (SUM_SLOTS - 1), (tile >> SUM_SLOTS.bit_length() - 1) & 1

    @cute.jit
    def sum_heads(self, flat, offsets, rings: Rings, scale, tile, warp, lane):
        """Sums over the warp's heads of exponentials, to the ring: of the tile number `tile` of all."""
        values = []
        for i in cutlass.range_constexpr(TILE // 4):
            at = i // 2 * 4 + i % 2
            upper = cute.math.exp2(cute.math.fma(flat[at], scale, offsets[0]), fastmath=True)
            lower = cute.math.exp2(cute.math.fma(flat[at + 2], scale, offsets[1]), fastmath=True)
            values.append(upper + lower)
        sums = cute.make_rmem_tensor((2,), Float32)
        sums[0], sums[1] = sum_rows(values, lane)
        slot, phase = self.sums_slot(tile)
        cute.arch.mbarrier_wait(rings.sums_empty + slot, phase ^ 1)
        cute.autovec_copy(sums, cute.local_tile(rings.sums[None, warp, slot], (2,), (lane,)))
        cute.arch.sync_warp()
        self.release(rings.sums_full + slot)

    @cute.jit
    def index(self, inputs: Inputs, rings: Rings, kl, d_scores, mma, index, work: Work, warp, lane):
        """The index warpgroup: scores, and the ends of the queries."""
        tid = warp * 32 + lane
        thr = mma.get_slice(tid)
        rk = mma.make_fragment_B(thr.partition_B(index))
        held = cute.make_rmem_tensor((*thr.partition_shape_A((TILE, CHUNK)), self.index_chunks), BFloat16)
        words = cute.make_tensor(
            cute.recast_ptr(held.iterator, dtype=Uint32), cute.make_layout((4, STEPS, self.index_chunks))
        )
        acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE, TILE)), Float32)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(TILE // 2))
        source = cute.recast_ptr(index.iterator, cute.make_swizzle(0, 4, 3), dtype=BFloat16)
        weights = cute.make_rmem_tensor((2,), Float32)
        slot, phase, tiles = Int32(0), Int32(0), Int32(0)
        column = tid & (TILE - 1)
        for query in cutlass.range(work.first, work.queries, work.step, unroll=1):
            for r in cutlass.range_constexpr(2):
                head = warp * 16 + (lane >> 2) + 8 * r
                weights[r] = Float32(0.0)
                if head < inputs.q_idx.shape[1]:
                    weights[r] = inputs.w_idx[query, head] * 0.5
            cute.arch.mbarrier_wait(rings.index_full + slot, phase)
            for chunk in cutlass.range_constexpr(self.index_chunks):
                memory = source + (slot * self.index_chunks + chunk) * (TILE * CHUNK)
                self.take_operand(words, chunk, memory, warp, lane)
            cute.arch.sync_warp()
            self.release(rings.index_empty + slot)
            slot, phase = advance(slot, phase, self.index_slots)
            # Of the column: of the target's warps their sum, of the others the highest score and the sum below it.
            total, top = Float32(0.0), Float32(NOTHING)
            for tile in cutlass.range(work.tiles, unroll=1):
                present = selected(inputs.indices[query, None], tile * TILE, [column], inputs.kv.shape[0])[0] >= 0
                cute.arch.mbarrier_wait(rings.index_full + slot, phase)
                own = opaque(slot)
                cute.nvgpu.warpgroup.fence()
                for chunk in cutlass.range_constexpr(self.index_chunks):
                    for step in cutlass.range_constexpr(STEPS):
                        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, chunk + step > 0)
                        keys = rk[None, None, step, own * self.index_chunks + chunk]
                        cute.gemm(mma, acc, held[None, None, step, chunk], keys, acc)
                cute.nvgpu.warpgroup.commit_group()
                cute.nvgpu.warpgroup.wait_group(0)
                self.release(rings.index_empty + slot)
                slot, phase = advance(slot, phase, self.index_slots)
                self.sum_index_heads(flat, weights, rings, tile & 1, warp, lane)
                cute.arch.barrier(barrier_id=INDEX_BARRIER, number_of_threads=WARPGROUP)
                place, turn = self.sums_slot(tiles + tile)
                cute.arch.mbarrier_wait(rings.sums_full + place, turn)
                if warp < 2:
                    amount = rings.sums[column, 0, place]
                    for i in cutlass.range_constexpr(1, 4 * self.row_tiles):
                        amount += rings.sums[column, i, place]
                    if not present:
                        amount = Float32(0.0)
                    rings.target[tile * TILE + column] = amount
                    total += amount
                else:
                    score = rings.own_sums[column, 0, tile & 1]
                    for i in cutlass.range_constexpr(1, 4):
                        score += rings.own_sums[column, i, tile & 1]
                    if not present:
                        score = -Float32(INFINITY)
                    rings.scores[tile * TILE + column] = score
                    higher = cute.arch.fmax(top, score)
                    total = total * self.power(top - higher) + self.power(score - higher)
                    top = higher
                cute.arch.sync_warp()
                self.release(rings.sums_empty + place)
            tiles += work.tiles
            self.finish(rings, kl, d_scores, query, work.tiles, total, top, warp, lane)

    @cute.jit
    def power(self, x: Float32):
        return cute.math.exp2(x * LOG2E, fastmath=True)

    @cute.jit
    def sum_index_heads(self, flat, weights, rings: Rings, slot, warp, lane):
        values = []
        for i in cutlass.range_constexpr(TILE // 4):
            at = i // 2 * 4 + i % 2
            # x + |x| = 2 relu(x), exactly; weights are halved. NaN passes.
            upper, lower = (x + cute.math.absf(x) for x in (flat[at], flat[at + 2]))
            values.append(cute.math.fma(lower, weights[1], upper * weights[0]))
        sums = cute.make_rmem_tensor((2,), Float32)
        sums[0], sums[1] = sum_rows(values, lane)
        cute.autovec_copy(sums, cute.local_tile(rings.own_sums[None, warp, slot], (2,), (lane,)))

    @cute.jit
    def finish(self, rings: Rings, kl, d_scores, query, tiles, total, top, warp, lane):
        """The query's distributions, its KL and d_scores; `total`, `top`: of a column, as its warp has them."""
        tid = warp * 32 + lane
        for log in cutlass.range_constexpr(5):
            other_top = cute.arch.shuffle_sync_bfly(top, offset=1 << log)
            other = cute.arch.shuffle_sync_bfly(total, offset=1 << log)
            higher = cute.arch.fmax(top, other_top)
            # Of the target all tops are the same.
            total = total * self.power(top - higher) + other * self.power(other_top - higher)
            top = higher
        rings.parts[2 * warp], rings.parts[2 * warp + 1] = total, top
        cute.arch.barrier(barrier_id=INDEX_BARRIER, number_of_threads=WARPGROUP)
        mass = rings.parts[0] + rings.parts[2]
        highest = cute.arch.fmax(rings.parts[5], rings.parts[7])
        amount = rings.parts[4] * self.power(rings.parts[5] - highest)
        amount += rings.parts[6] * self.power(rings.parts[7] - highest)
        # Without mass there is nothing to learn.
        inverse, lse = Float32(0.0), Float32(INFINITY)
        if not mass == 0.0:
            inverse, lse = 1.0 / mass, highest + cute.math.log2(amount) * LN2
        row = d_scores[query, None]
        target, scores = cute.make_rmem_tensor((4,), Float32), cute.make_rmem_tensor((4,), Float32)
        stored = cute.make_rmem_tensor((2,), Uint32)
        kept = cute.make_rmem_tensor((4,), Float32)
        words = cute.make_tensor(cute.recast_ptr(row.iterator, dtype=Uint32), cute.make_layout(row.shape[0] // 2))
        loss = Float32(0.0)
        for at in cutlass.range(tid, tiles * (TILE // 4), WARPGROUP, unroll=1):
            cute.autovec_copy(cute.local_tile(rings.target, (4,), (at,)), target)
            cute.autovec_copy(cute.local_tile(rings.scores, (4,), (at,)), scores)
            for i in cutlass.range_constexpr(4):
                p, log_student = target[i] * inverse, scores[i] - lse
                kept[i] = self.power(log_student) - p
                term = p * (cute.math.log2(p, fastmath=True) * LN2 - log_student)
                # Below it log2 has no logarithm; NaN counts.
                loss += Float32(0.0) if p < SMALLEST else term
            stored[0], stored[1] = pack(kept[0], kept[1], BFloat16), pack(kept[2], kept[3], BFloat16)
            cute.autovec_copy(stored, cute.local_tile(words, (2,), (at,)))
        for log in cutlass.range_constexpr(5):
            loss += cute.arch.shuffle_sync_bfly(loss, offset=1 << log)
        rings.parts[8 + warp] = loss
        # Behind it the next query's first tile may be written: its own barrier comes before that of these parts.
        cute.arch.barrier(barrier_id=INDEX_BARRIER, number_of_threads=WARPGROUP)
        if tid == 0:
            kl[query] = (rings.parts[8] + rings.parts[9]) + (rings.parts[10] + rings.parts[11])


@cached
def compile_sparse_indexer_target(channels: int, row_tiles: int, index_channels: int):
    """-> f(q [T, H, d], kv [Tk, d], q_idx [T, Hi, di], k_idx [Tk, di], w_idx [T, Hi] fp32, indices [T, K], lse [T, H]
    fp32, kl [T] fp32, d_scores [T, K'], scale * log2(e), ctas); all else bf16

    H up to 64 * row_tiles, Hi up to 64, K from 1 to MOST_KEYS; K' is K rounded up to a multiple of 64, and all of
    d_scores is written. Rows of q, kv, q_idx and k_idx start at multiples of 16 bytes.
    """
    queries, heads, index_heads, keys = (cute.sym_int() for _ in range(4))
    fake = cute.runtime.make_fake_tensor

    def rows(*shape):
        strides = (cute.sym_int64(divisibility=8) for _ in shape[1:])
        return fake(BFloat16, shape, (*strides, 1), assumed_align=16)

    def numbers(dtype, *shape):
        return fake(dtype, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=4)

    return compile_sm90(
        SparseIndexerTargetSm90(channels, row_tiles, index_channels),
        rows(queries, heads, channels),
        rows(keys, channels),
        rows(queries, index_heads, index_channels),
        rows(keys, index_channels),
        numbers(Float32, queries, index_heads),
        fake(Int32, (queries, cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4),
        numbers(Float32, queries, heads),
        fake(Float32, (queries,), (1,), assumed_align=4),
        rows(queries, cute.sym_int(divisibility=TILE)),
        *(Float32(0.0), Int32(1)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_sparse_indexer_target, (channels, row_tiles, index_channels))
        for channels in (576, 512)
        for row_tiles in (1, 2)
        for index_channels in (64, 128)
    ]
