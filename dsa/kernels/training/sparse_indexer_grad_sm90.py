"""Gradients of the sparse stage's indexer scores, I[t, j] = sum_i w[t, i] relu(q_i[t] . k[j]) over each query's keys.

With d[t, j] = g[t] d_scores[t, j] and a = 1 where q_i[t] . k[j] > 0, else 0:
G_i[t] = sum_j d a k[j];  dq_i[t] = w[t, i] G_i[t];  dw[t, i] = q_i[t] . G_i[t];  dk[j] += sum_i d a w[t, i] q_i[t]

Plan
- A CTA takes whole queries in turns, and runs through tiles of 64 of a query's keys, which are gathered with their
  d_scores, 16 bytes a lane, in a ring of tiles. All other data is a query's: q and w.
- The query warpgroup multiplies heads by keys, keeps d_scores where the product is positive, as an operand in
  registers, and adds up G over the query's tiles.
- Two key warpgroups, tiles in turns, multiply keys by heads: the same in the other orientation costs less than turning
  the operand. The second product, with g w q in bf16 of their own memory, is a tile's dk, added to global memory from
  registers: the columns of g w q are in such an order that a lane has four neighbouring channels.
- `fixed`: dk is in 64-bit integers, multiples of a power of two, whose sum depends on no order. Two neighbouring
  columns of a quad's lanes then are four channels apart, so that four lanes have four neighbours.
Shared memory: SLOTS tiles of keys, two queries, two of g w q.
Constraints: bf16; up to 64 heads of 64 or 128 channels.
Roofline: 1024 clocks of wgmma a tile of 64 heads x 128; its additions, 32 KiB, are 2650 at the 2.8 TB/s of
them that peers' times suggest. Measured 2650 (2048 of 8192 keys; 2.3 TB/s at 65536); integers 2.6 to 3.1 times as long.
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
from dsa.cute.copies import arrive_when_gathered, gather_16
from dsa.cute.pipeline import advance
from dsa.cute.shared_memory import load_16, load_matrices, pack, store_16, swizzled
from dsa.cute.sm90 import opaque
from dsa.kernels.training.gathered_rows import CHUNK, CHUNK_BYTES, TILE, gather_chunk, own_rows, row_addresses, selected
from dsa.kernels.training.global_sums import add_4, add_fixed

WARPGROUP = 128
THREADS = 4 * WARPGROUP
QUERY_REGISTERS, KEY_REGISTERS, LOADER_REGISTERS = 168, 144, 48
SLOTS, QUERY_SLOTS = 6, 2
STEPS = TILE // 16
READERS = 12
KEY_BARRIER = 1


@dataclass(frozen=True)
class Rings:
    """Barriers of each slot, and d_scores [64, SLOTS] of the tiles' keys."""

    full: cute.Pointer
    empty: cute.Pointer
    query_full: cute.Pointer
    query_empty: cute.Pointer
    d_scores: cute.Tensor


@dataclass(frozen=True)
class Inputs:
    """q [T, H, di], k [Tk, di], w [T, H], indices [T, K], d_scores [T, K'], g [T]"""

    q: cute.Tensor
    k: cute.Tensor
    w: cute.Tensor
    indices: cute.Tensor
    d_scores: cute.Tensor
    g: cute.Tensor


@dataclass(frozen=True)
class Work:
    """This CTA's queries are first, first + step and so on below `queries`; tiles of keys of each."""

    first: Int32
    step: Int32
    queries: Int32
    tiles: Int32


class SparseIndexerGradSm90:
    def __init__(self, channels: int, fixed: bool):
        self.channels, self.chunks, self.fixed = channels, channels // CHUNK, fixed

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        w: cute.Tensor,
        indices: cute.Tensor,
        d_scores: cute.Tensor,
        g: cute.Tensor,
        unit: cute.Tensor | None,
        dq: cute.Tensor,
        dw: cute.Tensor,
        dk: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        k_major, mn_major = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN
        registers, one = cute.nvgpu.warpgroup.OperandSource.RMEM, (1, 1, 1)
        make, types = sm90.make_trivial_tiled_mma, (BFloat16, BFloat16)
        scores_mma = make(*types, k_major, k_major, Float32, one, (TILE, TILE))
        held_mma = make(*types, k_major, k_major, Float32, one, (TILE, TILE), registers)
        # Of each role its own: what one sets, another must not find.
        query_mma, key_mma = (
            make(*types, k_major, mn_major, Float32, one, (TILE, self.channels), registers) for _ in range(2)
        )
        layouts = [
            sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE, TILE, self.channels), BFloat16, slots)
            for slots in (SLOTS, QUERY_SLOTS, 2)
        ]

        @cute.struct
        class Storage:
            full: cute.struct.MemRange[Int64, SLOTS]
            empty: cute.struct.MemRange[Int64, SLOTS]
            query_full: cute.struct.MemRange[Int64, QUERY_SLOTS]
            query_empty: cute.struct.MemRange[Int64, QUERY_SLOTS]
            d_scores: cute.struct.Align[cute.struct.MemRange[BFloat16, TILE * SLOTS], 128]
            keys: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layouts[0])], 1024]
            queries: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layouts[1])], 1024]
            weighted: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(layouts[2])], 1024]

        assert Storage.size_in_bytes() <= 232448
        self.storage = Storage
        inputs = Inputs(q, k, w, indices, d_scores, g)
        self.kernel(inputs, unit, dq, dw, dk, scores_mma, held_mma, query_mma, key_mma, *layouts).launch(
            grid=(ctas, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
        )

    @cute.kernel
    def kernel(
        self,
        inputs: Inputs,
        unit: cute.Tensor | None,
        dq: cute.Tensor,
        dw: cute.Tensor,
        dk: cute.Tensor,
        scores_mma: cute.TiledMma,
        held_mma: cute.TiledMma,
        query_mma: cute.TiledMma,
        key_mma: cute.TiledMma,
        keys_layout: cute.ComposedLayout,
        queries_layout: cute.ComposedLayout,
        weighted_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        storage = SmemAllocator().allocate(self.storage)
        keys = storage.keys.get_tensor(keys_layout.outer, swizzle=keys_layout.inner)
        queries = storage.queries.get_tensor(queries_layout.outer, swizzle=queries_layout.inner)
        weighted = storage.weighted.get_tensor(weighted_layout.outer, swizzle=weighted_layout.inner)
        rings = Rings(
            storage.full.data_ptr(),
            storage.empty.data_ptr(),
            storage.query_full.data_ptr(),
            storage.query_empty.data_ptr(),
            storage.d_scores.get_tensor(cute.make_layout((TILE, SLOTS))),
        )
        if tid == 0:
            # Lanes that gather fill a slot, warps empty it.
            for full, empty, slots in (
                (rings.full, rings.empty, SLOTS),
                (rings.query_full, rings.query_empty, QUERY_SLOTS),
            ):
                for i in cutlass.range_constexpr(slots):
                    cute.arch.mbarrier_init(full + i, WARPGROUP)
                    cute.arch.mbarrier_init(empty + i, READERS)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        work = Work(first, step, inputs.q.shape[0], (inputs.indices.shape[1] + TILE - 1) // TILE)
        if warp >= 12:
            cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            self.load(inputs, rings, keys, queries, work, warp - 12, lane)
        elif warp < 4:
            cute.arch.setmaxregister_increase(QUERY_REGISTERS)
            self.query_gradient(inputs, rings, dq, dw, held_mma, query_mma, keys, queries, work, warp, lane)
        else:
            cute.arch.setmaxregister_increase(KEY_REGISTERS)
            self.key_gradient(
                *(inputs, rings, unit, dk, scores_mma, key_mma, keys, queries, weighted, work),
                *(warp // 4 - 1, warp % 4, lane),
            )

    @cute.jit
    def load(self, inputs: Inputs, rings: Rings, keys, queries, work: Work, warp, lane):
        """The gathering warpgroup."""
        keys_start, queries_start = Int32(keys.iterator.toint()), Int32(queries.iterator.toint())
        scores_start = Int32(rings.d_scores.iterator.toint())
        rows = own_rows(warp, lane)
        slot, phase, own, own_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        for query in cutlass.range(work.first, work.queries, work.step, unroll=1):
            heads = []
            for row in rows:
                heads.append(row if row < inputs.q.shape[1] else Int32(-1))
            row = inputs.q[query, None, None]
            sources, keep = row_addresses(Int64(row.iterator.toint()), 2 * Int64(row.stride[0]), heads, lane)
            cute.arch.mbarrier_wait(rings.query_empty + own, own_phase ^ 1)
            for chunk in cutlass.range_constexpr(self.chunks):
                target = queries_start + (own * self.chunks + chunk) * CHUNK_BYTES
                gather_chunk(target, sources, keep, chunk, warp, lane)
            arrive_when_gathered(rings.query_full + own)
            own, own_phase = advance(own, own_phase, QUERY_SLOTS)
            # A tile's d_scores are 8 lanes' 16 bytes.
            scores = Int64(inputs.d_scores[query, None].iterator.toint()) + lane * 16
            found = selected(inputs.indices[query, None], Int32(0), rows, inputs.k.shape[0])
            for tile in cutlass.range(work.tiles, unroll=1):
                start, stride = Int64(inputs.k.iterator.toint()), 2 * Int64(inputs.k.stride[0])
                sources, keep = row_addresses(start, stride, found, lane)
                # The next tile's indices are on their way while these keys are asked for.
                found = selected(inputs.indices[query, None], (tile + 1) * TILE, rows, inputs.k.shape[0])
                cute.arch.mbarrier_wait(rings.empty + slot, phase ^ 1)
                if warp == 0 and lane < 8:
                    gather_16(scores_start + slot * (2 * TILE) + lane * 16, scores + tile * (2 * TILE), True)
                for chunk in cutlass.range_constexpr(self.chunks):
                    target = keys_start + (slot * self.chunks + chunk) * CHUNK_BYTES
                    gather_chunk(target, sources, keep, chunk, warp, lane)
                arrive_when_gathered(rings.full + slot)
                slot, phase = advance(slot, phase, SLOTS)

    @cute.jit
    def release(self, barrier: cute.Pointer):
        """This warp has read the slot."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def where_positive(self, word: Uint32, low: Float32, high: Float32):
        """Both halves of a word, or zeros where the products are not positive."""
        keep = Uint32(0)
        if low > 0.0:
            keep = Uint32(0xFFFF)
        if high > 0.0:
            keep |= Uint32(0xFFFF0000)
        return word & keep

    @cute.jit
    def query_gradient(self, inputs: Inputs, rings: Rings, dq, dw, held_mma, sum_mma, keys, queries, work, warp, lane):
        """The query warpgroup: dq and dw."""
        tid = warp * 32 + lane
        thr, sum_thr = held_mma.get_slice(tid), sum_mma.get_slice(tid)
        rk = held_mma.make_fragment_B(thr.partition_B(keys))
        turned = cute.make_tensor(keys.iterator, cute.select(keys.layout, mode=[1, 0, 2]))
        rv = sum_mma.make_fragment_B(sum_thr.partition_B(turned))
        held = cute.make_rmem_tensor(thr.partition_shape_A((TILE, self.channels)), BFloat16)
        held_words = cute.make_tensor(
            cute.recast_ptr(held.iterator, dtype=Uint32), cute.make_layout((4, self.channels // 16))
        )
        operand = cute.make_rmem_tensor(sum_thr.partition_shape_A((TILE, TILE)), BFloat16)
        words = cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Uint32), cute.make_layout((4, STEPS)))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE, TILE)), Float32)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(TILE // 2))
        total = cute.make_rmem_tensor(sum_thr.partition_shape_C((TILE, self.channels)), Float32)
        sums = cute.make_tensor(total.iterator, cute.make_layout(self.channels // 2))
        source = cute.recast_ptr(queries.iterator, cute.make_swizzle(0, 4, 3), dtype=BFloat16)
        pairs = cute.make_tensor(
            cute.recast_ptr(rings.d_scores.iterator, dtype=Uint32), cute.make_layout((TILE // 2, SLOTS))
        )
        sum_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        slot, phase, own, own_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        for query in cutlass.range(work.first, work.queries, work.step, unroll=1):
            cute.arch.mbarrier_wait(rings.query_full + own, own_phase)
            for step in cutlass.range_constexpr(self.channels // 16):
                place = own * self.chunks + step // (CHUNK // 16)
                address = source + place * (TILE * CHUNK)
                address += swizzled(warp * 16 + (lane & 15), step % (CHUNK // 16) * 2 + (lane >> 4))
                for i, word in enumerate(load_matrices(Int32(address.toint()))):
                    held_words[i, step] = word
            cute.arch.sync_warp()
            self.release(rings.query_empty + own)
            own, own_phase = advance(own, own_phase, QUERY_SLOTS)
            sums.fill(0.0)
            for _ in cutlass.range(work.tiles, unroll=1):
                cute.arch.mbarrier_wait(rings.full + slot, phase)
                here = opaque(slot)
                cute.nvgpu.warpgroup.fence()
                for step in cutlass.range_constexpr(self.channels // 16):
                    held_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
                    cute.gemm(held_mma, acc, held[None, None, step], rk[None, None, step, here], acc)
                cute.nvgpu.warpgroup.commit_group()
                cute.nvgpu.warpgroup.wait_group(0)
                for j in cutlass.range_constexpr(TILE // 8):
                    word = pairs[4 * j + (lane & 3), here]
                    for r in cutlass.range_constexpr(2):
                        at = 4 * j + 2 * r
                        words[j % 2 * 2 + r, j // 2] = self.where_positive(word, flat[at], flat[at + 1])
                cute.nvgpu.warpgroup.fence()
                for step in cutlass.range_constexpr(STEPS):
                    cute.gemm(sum_mma, total, operand[None, None, step], rv[None, None, step, here], total)
                cute.nvgpu.warpgroup.commit_group()
                cute.nvgpu.warpgroup.wait_group(0)
                self.release(rings.empty + slot)
                slot, phase = advance(slot, phase, SLOTS)
            self.store(inputs, dq, dw, held, sums, query, warp, lane)

    @cute.jit
    def store(self, inputs: Inputs, dq, dw, held, sums, query, warp, lane):
        """From a query's G its dq and dw: a lane has the same of G and of q."""
        halves = cute.make_tensor(held.iterator, cute.make_layout((2, 2, 2, self.channels // 16)))
        scale = inputs.g[query]
        for r in cutlass.range_constexpr(2):
            head = warp * 16 + (lane >> 2) + 8 * r
            weight = Float32(0.0)
            if head < inputs.q.shape[1]:
                weight = inputs.w[query, head] * scale
            amount = Float32(0.0)
            for j in cutlass.range_constexpr(self.channels // 8):
                for e in cutlass.range_constexpr(2):
                    number = halves[e, r, j % 2, j // 2].to(Float32)
                    amount = cute.math.fma(number, sums[4 * j + 2 * r + e], amount)
            amount += cute.arch.shuffle_sync_bfly(amount, offset=1)
            amount += cute.arch.shuffle_sync_bfly(amount, offset=2)
            if head < inputs.q.shape[1]:
                if lane & 3 == 0:
                    dw[query, head] = amount * scale
                row = dq[query, head, None]
                target = cute.make_tensor(
                    cute.recast_ptr(row.iterator, dtype=Uint32), cute.make_layout(self.channels // 2)
                )
                for j in cutlass.range_constexpr(self.channels // 8):
                    at = 4 * j + 2 * r
                    target[4 * j + (lane & 3)] = pack(sums[at] * weight, sums[at + 1] * weight, BFloat16)

    @cute.jit
    def key_gradient(
        self,
        inputs: Inputs,
        rings: Rings,
        unit,
        dk,
        scores_mma,
        sum_mma,
        keys,
        queries,
        weighted,
        work,
        side,
        warp,
        lane,
    ):
        """A key warpgroup, number `side`: dk of every second tile."""
        tid = warp * 32 + lane
        thr, sum_thr = scores_mma.get_slice(tid), sum_mma.get_slice(tid)
        rk = scores_mma.make_fragment_A(thr.partition_A(keys))
        rq = scores_mma.make_fragment_B(thr.partition_B(queries))
        turned = cute.make_tensor(weighted.iterator, cute.select(weighted.layout, mode=[1, 0, 2]))
        rw = sum_mma.make_fragment_B(sum_thr.partition_B(turned))
        operand = cute.make_rmem_tensor(sum_thr.partition_shape_A((TILE, TILE)), BFloat16)
        words = cute.make_tensor(cute.recast_ptr(operand.iterator, dtype=Uint32), cute.make_layout((4, STEPS)))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE, TILE)), Float32)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(TILE // 2))
        total = cute.make_rmem_tensor(sum_thr.partition_shape_C((TILE, self.channels)), Float32)
        sums = cute.make_tensor(total.iterator, cute.make_layout(self.channels // 2))
        scores = cute.make_tensor(
            cute.recast_ptr(rings.d_scores.iterator, dtype=cutlass.Uint16), cute.make_layout((TILE, SLOTS))
        )
        rows = [warp * 16 + (lane >> 2) + 8 * r for r in range(2)]
        multiple = Float32(1.0)
        if const_expr(self.fixed):
            multiple = unit[0]
        slot, phase, own, own_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        for query in cutlass.range(work.first, work.queries, work.step, unroll=1):
            cute.arch.mbarrier_wait(rings.query_full + own, own_phase)
            # All warps have multiplied with the query before.
            cute.arch.barrier(barrier_id=KEY_BARRIER + side, number_of_threads=WARPGROUP)
            self.weigh(inputs, queries, weighted, query, own, side, tid)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=KEY_BARRIER + side, number_of_threads=WARPGROUP)
            if side == 1:
                slot, phase = self.pass_over(rings, slot, phase)
            for tile in cutlass.range(side, work.tiles, 2, unroll=1):
                found = selected(inputs.indices[query, None], tile * TILE, rows, inputs.k.shape[0])
                cute.arch.mbarrier_wait(rings.full + slot, phase)
                here = opaque(slot)
                cute.nvgpu.warpgroup.fence()
                for step in cutlass.range_constexpr(self.channels // 16):
                    scores_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
                    cute.gemm(scores_mma, acc, rk[None, None, step, here], rq[None, None, step, own], acc)
                cute.nvgpu.warpgroup.commit_group()
                cute.nvgpu.warpgroup.wait_group(0)
                for r in cutlass.range_constexpr(2):
                    score = Uint32(scores[rows[r], here])
                    word = score | score << Uint32(16)
                    for j in cutlass.range_constexpr(TILE // 8):
                        at = 4 * j + 2 * r
                        words[j % 2 * 2 + r, j // 2] = self.where_positive(word, flat[at], flat[at + 1])
                cute.arch.sync_warp()
                self.release(rings.empty + slot)
                slot, phase = advance(slot, phase, SLOTS)
                cute.nvgpu.warpgroup.fence()
                for step in cutlass.range_constexpr(STEPS):
                    sum_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
                    cute.gemm(sum_mma, total, operand[None, None, step], rw[None, None, step, side], total)
                cute.nvgpu.warpgroup.commit_group()
                cute.nvgpu.warpgroup.wait_group(0)
                self.add(dk, sums, found, multiple, lane)
                if tile + 1 < work.tiles:
                    slot, phase = self.pass_over(rings, slot, phase)
            self.release(rings.query_empty + own)
            own, own_phase = advance(own, own_phase, QUERY_SLOTS)

    @cute.jit
    def pass_over(self, rings: Rings, slot, phase):
        """A tile of the other key warpgroup's: all wait for every slot, so that phases are not taken for each other."""
        cute.arch.mbarrier_wait(rings.full + slot, phase)
        self.release(rings.empty + slot)
        return advance(slot, phase, SLOTS)

    @cute.jit
    def weigh(self, inputs: Inputs, queries, weighted, query, own, side, tid):
        """g w q to the warpgroup's own memory, columns in the order in which lanes shall have them."""
        source = Int32(queries.iterator.toint()) + own * (self.chunks * CHUNK_BYTES)
        target = Int32(weighted.iterator.toint()) + side * (self.chunks * CHUNK_BYTES)
        for i in cutlass.range_constexpr(2):
            row, column = i * (TILE // 2) + (tid >> 2), (tid & 3) * 2  # of vectors of 8 channels: two
            weight = Float32(0.0)
            if row < inputs.q.shape[1]:
                weight = inputs.w[query, row] * inputs.g[query]
            for chunk in cutlass.range_constexpr(self.chunks):
                places = [chunk * CHUNK_BYTES + 2 * swizzled(row, column + h) for h in range(2)]
                values = []
                for place in places:
                    for word in load_16(source + place):
                        values.append((word << Uint32(16)).bitcast(Float32) * weight)
                        values.append((word & Uint32(0xFFFF0000)).bitcast(Float32) * weight)
                for h in cutlass.range_constexpr(2):
                    if const_expr(self.fixed):
                        # Of eight channels, 4 e + lane is column 2 lane + e.
                        words = [pack(values[8 * h + n], values[8 * h + 4 + n], BFloat16) for n in range(4)]
                    else:
                        # Of sixteen channels, 4 lane + 2 h + e is column 8 h + 2 lane + e.
                        words = [pack(values[4 * n + 2 * h], values[4 * n + 2 * h + 1], BFloat16) for n in range(4)]
                    store_16(target + places[h], words)

    @cute.jit
    def add(self, dk, sums, found, multiple, lane):
        """A tile's rows to dk."""
        start, stride = Int64(dk.iterator.toint()), Int64(dk.stride[0]) * (dk.element_type.width // 8)
        for r in cutlass.range_constexpr(2):
            if found[r] >= 0:
                row = start + found[r] * stride
                if const_expr(self.fixed):
                    row += (lane & 3) * 8
                    for j in cutlass.range_constexpr(self.channels // 8):
                        for e in cutlass.range_constexpr(2):
                            add_fixed(row + 64 * j + 32 * e, sums[4 * j + 2 * r + e] * multiple)
                else:
                    row += (lane & 3) * 16
                    for i in cutlass.range_constexpr(self.channels // 16):
                        add_4(row + 64 * i, [sums[8 * i + 4 * h + 2 * r + e] for h in range(2) for e in range(2)])


@cached
def compile_sparse_indexer_grad(channels: int, fixed: bool):
    """-> f(q [T, H, di], k [Tk, di], w [T, H] fp32, indices [T, K], d_scores [T, K'], g [T] fp32, unit [1] fp32 or
    None, dq [T, H, di], dw [T, H] fp32, dk [Tk, di], ctas); q, k, d_scores and dq bf16, rows at multiples of 16 bytes

    dk is fp32, or with `fixed` int64 in multiples of 1 / unit; it is added to. H up to 64, K from 1, K' is K rounded up
    to a multiple of 64. d_scores are 0 where there is no key.
    """
    queries, heads, keys = (cute.sym_int() for _ in range(3))
    fake = cute.runtime.make_fake_tensor

    def rows(dtype, *shape):
        strides = (cute.sym_int64(divisibility=128 // dtype.width) for _ in shape[1:])
        return fake(dtype, shape, (*strides, 1), assumed_align=16)

    def numbers(dtype, *shape):
        return fake(dtype, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=4)

    return compile_sm90(
        SparseIndexerGradSm90(channels, fixed),
        rows(BFloat16, queries, heads, channels),
        rows(BFloat16, keys, channels),
        numbers(Float32, queries, heads),
        fake(Int32, (queries, cute.sym_int()), (cute.sym_int64(), 1), assumed_align=4),
        rows(BFloat16, queries, cute.sym_int(divisibility=TILE)),
        numbers(Float32, queries),
        numbers(Float32, 1) if fixed else None,
        rows(BFloat16, queries, heads, channels),
        numbers(Float32, queries, heads),
        rows(Int64 if fixed else Float32, keys, channels),
        Int32(1),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_sparse_indexer_grad, (channels, fixed)) for channels in (64, 128) for fixed in (False, True)]
