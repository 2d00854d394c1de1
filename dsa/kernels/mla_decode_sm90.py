"""Dense MLA decoding over a paged latent cache, for any number of rows (query tokens x heads) a KV head.

o[r] = softmax_j(scale * q[r] . k[j]) k[j, :512], rows r of one sequence and KV head; q and k of 576 channels

Plan
- A CTA has 64 rows and runs through the tiles of 64 keys of its pieces of sequences (latent_tiles.py). With an even
  number of row tiles, the two CTAs of a cluster have the same keys: each loads half of every tile, into the shared
  memory of both.
- One warpgroup scores: S = Q K^T by wgmma, HELD of the 9 chunks of Q in registers, online softmax in registers, P in 16
  bits to shared memory. Two warpgroups accumulate: each has 64 x 256 of O += P V. A warp of the fourth loads.
- While a tile's softmax is computed, no scores are under way, and its P is not there yet. So that the tensor cores have
  work then, half of the last tile's O += P V waits until this tile has been scored. Also P comes in two halves of the
  keys, the first before the second's powers are computed.
- The maximum that P is relative to may lag behind the true one by a factor of 2^8: O is rescaled only when it must be,
  and powers are computed without waiting for the tile's maximum.
- A piece that is a whole sequence writes out and lse; others write partial results, normalised, for mla_combine_sm90.
Shared memory: FREE chunks of Q, two P, UNITS x 16 KiB + ROPES x 8 KiB of keys: two and a half tiles.
Registers: SCORE + 2 x OUTPUT + LOADER = 512 a lane: 32 scores and 16 a chunk of Q; 128 of O. A wgmma of 256 columns,
with its 128 accumulators, cannot be compiled for 512 threads: O += P V is in units of 128.
Launch: programmatic; the combining kernel follows so, too.
Roofline: of a tile wgmma takes 2176 clocks. Shared memory delivers 72 KiB of K and 32 of Q for scores, 64 of V and 32
of P for O, takes in 72 of keys and 8 of P: 2240 clocks. Memory delivers a tile in 4000 clocks, to all multiprocessors
at once. One row tile is bound by memory, more are bound by arithmetic, and by power: 80 to 86% of the bf16 GEMM's rate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.dtypes import cute_dtype
from dsa.cute.latent_queries import ROWS, request_queries, swizzled
from dsa.cute.latent_tiles import (
    CHUNK,
    FACTS,
    FIRST_TILE,
    LATENT,
    LENGTH,
    PART,
    ROPE_AFTER,
    SEEN,
    SEQUENCE,
    TILE,
    TILES,
    UNIT,
    UNIT_CHUNKS,
    UNIT_ORDER,
    VALUE,
    DecodeInputs,
    LatentRings,
    LatentTiles,
    zero_rows,
)
from dsa.cute.matrix_store import pack, store_matrices
from dsa.cute.register_pressure import computed_here
from dsa.cute.ring import advance

WARPGROUP = 128
THREADS = 4 * WARPGROUP
SCORE_REGISTERS, OUTPUT_REGISTERS, LOADER_REGISTERS = 152, 160, 40
Q_CHUNKS = LATENT // CHUNK
HELD = 5  # chunks of Q in registers
FREE = Q_CHUNKS - HELD
UNITS, ROPES = 10, 2
# The channels of Q, by chunks, in the order of the keys' units.
Q_ORDER = [unit * UNIT_CHUNKS + c for unit in UNIT_ORDER for c in range(UNIT_CHUNKS)]
Q_ORDER.insert(ROPE_AFTER * UNIT_CHUNKS, VALUE // CHUNK)
HALF = VALUE // 2
LAG = 8.0  # the most, in powers of two, that P may exceed 1 by
LN2 = 0.6931471805599453
P_SLOTS = 2
SCORE_BARRIER, OUTPUT_BARRIER = 1, 2
STAGED = 32  # channels of a row that go through shared memory at a time, at the end


@dataclass(frozen=True)
class Exchange:
    """What the scoring and the accumulating warpgroups tell each other. Pointers are to barriers.

    p        [64, 64, P_SLOTS]; p_full: of each slot, one for each half of its keys; p_empty: of each slot
    factors  [64, P_SLOTS]: what the rows of O are to be multiplied by before a tile; with the first half of P
    scored   the scores of another tile are there
    inverses [64]: what O is to be multiplied by at the end; end_full, end_empty
    """

    p: cute.Tensor
    p_full: cute.Pointer
    p_empty: cute.Pointer
    factors: cute.Tensor
    scored: cute.Pointer
    inverses: cute.Tensor
    end_full: cute.Pointer
    end_empty: cute.Pointer


@dataclass(frozen=True)
class RowTile:
    """Rows first to first + 63 of the `rows` of a KV head, which has `heads` heads a query."""

    heads: Int32
    rows: Int32
    first: Int32
    kv_head: Int32


@dataclass(frozen=True)
class SoftmaxState:
    """Of a lane's two rows: how many keys they see, the maximum that P is relative to (base: 0 while there is none), in
    powers of two, and the lane's part of the sum."""

    limits: cute.Tensor
    top: cute.Tensor
    base: cute.Tensor
    total: cute.Tensor


class MlaDecodeSm90:
    """`box` keys lie in the same page; `cluster` CTAs share the keys."""

    def __init__(self, dtype: type[cutlass.Numeric], box: int, cluster: int):
        self.dtype, self.cluster = dtype, cluster
        self.tiles = LatentTiles(dtype, box, UNITS, ROPES, cluster)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        cache: cute.Tensor,
        block_table: cute.Tensor,
        lengths: cute.Tensor,
        plan: cute.Tensor,
        num_splits: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_parts: cute.Tensor,
        lse_parts: cute.Tensor,
        scale: Float32,
        causal: Int32,
        capacity: Int32,
        fixed_splits: Int32,
        stream,
    ):
        atom, keys = self.tiles.load_atom(cache)
        k_major, mn_major = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN
        registers = cute.nvgpu.warpgroup.OperandSource.RMEM
        make = sm90.make_trivial_tiled_mma
        one = (1, 1, 1)
        score = make(self.dtype, self.dtype, k_major, k_major, Float32, one, (ROWS, TILE))
        score_held = make(self.dtype, self.dtype, k_major, k_major, Float32, one, (ROWS, TILE), registers)
        value = make(self.dtype, self.dtype, k_major, mn_major, Float32, one, (ROWS, UNIT))
        q_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, TILE, FREE * CHUNK), self.dtype, 1)
        p_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, TILE, TILE), self.dtype, P_SLOTS)
        unit_layout, rope_layout = self.tiles.unit_layout(), self.tiles.rope_layout()

        @cute.struct
        class Storage:
            unit_full: cute.struct.MemRange[Int64, UNITS * UNIT_CHUNKS]
            unit_empty: cute.struct.MemRange[Int64, UNITS]
            rope_full: cute.struct.MemRange[Int64, ROPES]
            rope_empty: cute.struct.MemRange[Int64, ROPES]
            named: cute.struct.MemRange[Int64, FACTS]
            facts_full: cute.struct.MemRange[Int64, FACTS]
            facts_empty: cute.struct.MemRange[Int64, FACTS]
            p_full: cute.struct.MemRange[Int64, 2 * P_SLOTS]
            p_empty: cute.struct.MemRange[Int64, P_SLOTS]
            scored: cute.struct.MemRange[Int64, 1]
            end_full: cute.struct.MemRange[Int64, 1]
            end_empty: cute.struct.MemRange[Int64, 1]
            present: cute.struct.MemRange[Uint32, ROPES]
            facts: cute.struct.MemRange[Int32, 8 * FACTS]
            # Of the rows: what O is to be multiplied by before a tile, and at the end.
            factors: cute.struct.MemRange[Float32, ROWS * P_SLOTS]
            inverses: cute.struct.MemRange[Float32, ROWS]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(p_layout)], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            units: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(unit_layout)], 1024]
            ropes: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(rope_layout)], 1024]

        self.storage = Storage
        page_boxes = cute.fast_divmod_create_divisor_v2(cache.shape[1] // self.tiles.box)
        row_tiles = (q.shape[1] * (q.shape[2] // cache.shape[2]) + ROWS - 1) // ROWS
        parts = plan.shape[0]
        if fixed_splits > 0:
            parts = lengths.shape[0] * fixed_splits
        self.kernel(
            *(atom, keys, q, block_table, lengths, plan, num_splits, out, lse, out_parts, lse_parts),
            *(scale, causal, capacity, fixed_splits, page_boxes, row_tiles),
            *(score, score_held, value, q_layout, p_layout, unit_layout, rope_layout),
        ).launch(
            grid=(parts * row_tiles, cache.shape[2], 1),
            block=(THREADS, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        mk: cute.Tensor,
        q: cute.Tensor,
        block_table: cute.Tensor,
        lengths: cute.Tensor,
        plan: cute.Tensor,
        num_splits: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_parts: cute.Tensor,
        lse_parts: cute.Tensor,
        scale: Float32,
        causal: Int32,
        capacity: Int32,
        fixed_splits: Int32,
        page_boxes: cute.FastDivmodDivisorV2,
        row_tiles: Int32,
        score_mma: cute.TiledMma,
        held_mma: cute.TiledMma,
        value_mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        p_layout: cute.ComposedLayout,
        unit_layout: cute.ComposedLayout,
        rope_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        block, kv_head, _ = cute.arch.block_idx()
        part, row_tile = block // row_tiles, block % row_tiles
        storage = SmemAllocator().allocate(self.storage)
        rings = LatentRings(
            storage.unit_full.data_ptr(),
            storage.unit_empty.data_ptr(),
            storage.rope_full.data_ptr(),
            storage.rope_empty.data_ptr(),
            storage.named.data_ptr(),
            storage.facts_full.data_ptr(),
            storage.facts_empty.data_ptr(),
            storage.present.get_tensor(cute.make_layout(ROPES)),
            storage.facts.get_tensor(cute.make_layout((8, FACTS))),
        )
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        exchange = Exchange(
            storage.p.get_tensor(p_layout.outer, swizzle=p_layout.inner),
            storage.p_full.data_ptr(),
            storage.p_empty.data_ptr(),
            storage.factors.get_tensor(cute.make_layout((ROWS, P_SLOTS))),
            storage.scored.data_ptr(),
            storage.inverses.get_tensor(cute.make_layout(ROWS)),
            storage.end_full.data_ptr(),
            storage.end_empty.data_ptr(),
        )
        units = storage.units.get_tensor(unit_layout.outer, swizzle=unit_layout.inner)
        ropes = storage.ropes.get_tensor(rope_layout.outer, swizzle=rope_layout.inner)

        if warp == 12:
            cute.nvgpu.cpasync.prefetch_descriptor(atom)
        if tid == 0:
            self.tiles.init(rings, 4, 4, 12)
            for i in cutlass.range_constexpr(P_SLOTS):
                cute.arch.mbarrier_init(exchange.p_full + 2 * i, 4)
                cute.arch.mbarrier_init(exchange.p_full + (2 * i + 1), 4)
                cute.arch.mbarrier_init(exchange.p_empty + i, 8)
            cute.arch.mbarrier_init(exchange.scored, 4)
            cute.arch.mbarrier_init(exchange.end_full, 4)
            cute.arch.mbarrier_init(exchange.end_empty, 8)
        cute.arch.mbarrier_init_fence()
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        # What is behind this point touches global memory: the kernels before must be done with it.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        heads = q.shape[2] // mk.shape[2]
        tile = RowTile(heads, q.shape[1] * heads, row_tile * ROWS, kv_head)
        if warp >= 12:
            cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if warp == 12:
                inputs = DecodeInputs(
                    *(lengths, block_table, plan, num_splits, page_boxes, capacity, fixed_splits),
                )
                boxes, rope_boxes = self.tiles.box_layout(UNITS * UNIT_CHUNKS), self.tiles.box_layout(ROPES)
                rank = block % self.cluster
                self.tiles.load(
                    *(atom, mk, storage.units.get_tensor(boxes.outer, swizzle=boxes.inner)),
                    storage.ropes.get_tensor(rope_boxes.outer, swizzle=rope_boxes.inner),
                    *(rings, inputs, part, kv_head, rank, lane, out_parts.shape[0]),
                )
        elif warp < 4:
            cute.arch.setmaxregister_increase(SCORE_REGISTERS)
            self.score(
                *(q, lse, lse_parts, score_mma, held_mma, sq, units, ropes, rings, exchange, tile, scale, causal),
                *(tid, warp, lane),
            )
        else:
            cute.arch.setmaxregister_increase(OUTPUT_REGISTERS)
            self.accumulate(
                *(out, out_parts, value_mma, units, rings, exchange, tile),
                *(tid % WARPGROUP, warp % 4, lane, warp // 4 - 1),
            )
        if const_expr(self.cluster > 1):
            # The other CTA may still write to this one's shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def multiply(self, acc, score_mma, held_mma, held, rq, ru, rr, rings: LatentRings, ring):
        """Start acc = Q K^T of the next tile, as its parts arrive. -> the ring behind the tile."""
        unit, unit_phase, rope, rope_phase = ring
        cute.nvgpu.warpgroup.fence()
        for n, chunk in enumerate(Q_ORDER):
            if const_expr(chunk < VALUE // CHUNK):
                cute.arch.mbarrier_wait(rings.unit_full + (unit * UNIT_CHUNKS + chunk % UNIT_CHUNKS), unit_phase)
            else:
                cute.arch.mbarrier_wait(rings.rope_full + rope, rope_phase)
            own_unit, own_rope = computed_here(unit), computed_here(rope)
            for step in cutlass.range_constexpr(CHUNK // 16):
                keys = rr[None, None, step, own_rope]
                if const_expr(chunk < VALUE // CHUNK):
                    keys = ru[None, None, chunk % UNIT_CHUNKS * (CHUNK // 16) + step, own_unit]
                if const_expr(n < HELD):
                    held_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, n + step > 0)
                    cute.gemm(held_mma, acc, held[None, None, step, n], keys, acc)
                else:
                    score_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, n + step > 0)
                    at = (n - HELD) * (CHUNK // 16) + step
                    cute.gemm(score_mma, acc, rq[None, None, at, 0], keys, acc)
            if const_expr(chunk < VALUE // CHUNK and chunk % UNIT_CHUNKS == UNIT_CHUNKS - 1):
                unit, unit_phase = advance(unit, unit_phase, UNITS)
        cute.nvgpu.warpgroup.commit_group()
        rope, rope_phase = advance(rope, rope_phase, ROPES)
        return unit, unit_phase, rope, rope_phase

    @cute.jit
    def score(
        self,
        q,
        lse,
        lse_parts,
        score_mma,
        held_mma,
        sq,
        units,
        ropes,
        rings: LatentRings,
        exchange: Exchange,
        tile: RowTile,
        scale,
        causal,
        tid,
        warp,
        lane,
    ):
        thr = score_mma.get_slice(tid)
        rq = score_mma.make_fragment_A(thr.partition_A(sq))
        ru = score_mma.make_fragment_B(thr.partition_B(units))
        rr = score_mma.make_fragment_B(thr.partition_B(ropes))
        held_shape = held_mma.get_slice(tid).partition_shape_A((ROWS, CHUNK))
        held = cute.make_rmem_tensor((*held_shape, HELD), self.dtype)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((ROWS, TILE)), Float32)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(TILE // 2))
        own_row = warp * 16 + lane // 4  # and 8 further
        queries = q.shape[1]
        numbers = [cute.make_rmem_tensor((2,), dtype) for dtype in (Int32, Float32, Float32, Float32)]
        state = SoftmaxState(*numbers)
        ring = (Int32(0), Int32(0), Int32(0), Int32(0))
        place = (Int32(0), Int32(0))  # of P
        end_phase, at, facts_phase, sequence = Int32(0), Int32(0), Int32(0), Int32(0)
        while sequence >= 0:
            cute.arch.mbarrier_wait(rings.named + at, facts_phase)
            sequence = rings.facts[SEQUENCE, at]
            if sequence >= 0:
                request_queries(
                    *(q, sq, held, Q_ORDER, sequence, tile.heads, tile.rows, tile.first, tile.kv_head),
                    *(tid, warp, lane),
                )
            cute.arch.mbarrier_wait(rings.facts_full + at, facts_phase)
            first, tiles, part = rings.facts[FIRST_TILE, at], rings.facts[TILES, at], rings.facts[PART, at]
            length, seen = rings.facts[LENGTH, at], rings.facts[SEEN, at]
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.facts_empty + at)
            at, facts_phase = advance(at, facts_phase, FACTS)
            if sequence >= 0:
                least = length
                if causal > 0:
                    least = cutlass.min(length, seen - queries + 1)
                for r in cutlass.range_constexpr(2):
                    state.limits[r] = length
                    if causal > 0:
                        query = computed_here(tile.first + own_row + 8 * r) // tile.heads
                        state.limits[r] = cutlass.min(length, seen - queries + 1 + query)
                state.top.fill(-float("inf"))
                state.base.fill(0.0)
                state.total.fill(0.0)
                cute.arch.cp_async_wait_group(0)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)
                key = first * TILE
                for _ in cutlass.range(tiles, unroll=1):
                    here = ring
                    ring = self.multiply(acc, score_mma, held_mma, held, rq, ru, rr, rings, ring)
                    place = self.softmax(
                        flat, state, exchange, rings, units, here, key, length, least, scale, place, tid, warp, lane
                    )
                    key += TILE
                cute.arch.mbarrier_wait(exchange.end_empty, end_phase ^ 1)
                for r in cutlass.range_constexpr(2):
                    amount = state.total[r] + cute.arch.shuffle_sync_bfly(state.total[r], offset=1)
                    amount += cute.arch.shuffle_sync_bfly(amount, offset=2)
                    inverse, result = Float32(0.0), Float32(float("inf"))
                    if part >= 0:
                        result = -Float32(float("inf"))
                    if amount != 0.0:
                        inverse = 1.0 / amount
                        result = state.top[r] * LN2 + cute.math.log(amount)
                    if lane % 4 == 0:
                        exchange.inverses[own_row + 8 * r] = inverse
                        row = computed_here(tile.first + own_row + 8 * r)
                        if row < tile.rows:
                            if part >= 0:
                                lse_parts[part, tile.kv_head, row] = result
                            else:
                                head = tile.kv_head * tile.heads + row % tile.heads
                                lse[sequence, head, row // tile.heads] = result
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(exchange.end_full)
                end_phase ^= 1

    @cute.jit
    def softmax(
        self,
        flat,
        state: SoftmaxState,
        exchange: Exchange,
        rings: LatentRings,
        units,
        ring,
        key,
        length,
        least,
        scale,
        place,
        tid,
        warp,
        lane,
    ):
        """Wait for a tile's scores; P to shared memory, with what O must be multiplied by before. -> the next place.

        The first half of the keys is on its way before the second half's powers are computed. Its powers are relative
        to the maximum so far, which need not be known anew: only where a row of the warp has risen by more than LAG
        are they computed again.
        """
        top, base, total = state.top, state.base, state.total
        unit, _, rope, _ = ring
        slot, phase = place
        bits = rings.present[rope]
        cute.arch.mbarrier_wait(exchange.p_empty + slot, phase ^ 1)
        cute.nvgpu.warpgroup.wait_group(0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(exchange.scored)
        every = 2**self.tiles.boxes - 1
        if key + TILE > least or bits != every:
            for i in cutlass.range_constexpr(TILE // 2):
                column = i // 4 * 8 + lane % 4 * 2 + i % 2
                box = i // 4 * 8 // self.tiles.box
                if key + column >= state.limits[i // 2 % 2] or (bits >> box) & 1 == 0:
                    flat[i] = -Float32(float("inf"))
            if key + TILE > length:
                zero_rows(units.iterator, unit, UNITS, length - key, tid)
        powers = cute.make_rmem_tensor((TILE // 4,), Float32)
        for i in cutlass.range_constexpr(TILE // 4):
            powers[i] = cute.math.exp2(cute.math.fma(flat[i], scale, -base[i // 2 % 2]), fastmath=True)
        highest, changed = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
        changed.fill(1.0)
        for r in cutlass.range_constexpr(2):
            value = flat[2 * r]
            for i in cutlass.range_constexpr(1, TILE // 4):
                value = cute.arch.fmax(value, flat[i // 2 * 4 + 2 * r + i % 2])
            value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1))
            highest[r] = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2)) * scale
        if cute.arch.vote_any_sync(highest[0] > top[0] + LAG or highest[1] > top[1] + LAG):
            for r in cutlass.range_constexpr(2):
                if highest[r] > top[r] + LAG:
                    changed[r] = cute.math.exp2(top[r] - highest[r], fastmath=True)
                    top[r] = highest[r]
                    base[r] = highest[r]
                    total[r] *= changed[r]
            for i in cutlass.range_constexpr(TILE // 4):
                powers[i] = cute.math.exp2(cute.math.fma(flat[i], scale, -base[i // 2 % 2]), fastmath=True)

        if lane % 4 == 0:
            exchange.factors[warp * 16 + lane // 4, slot] = changed[0]
            exchange.factors[warp * 16 + lane // 4 + 8, slot] = changed[1]
        start = Int32(exchange.p.iterator.toint()) + slot * (ROWS * TILE * 2)
        row = warp * 16 + lane % 16
        for half in cutlass.range_constexpr(2):
            if const_expr(half == 1):
                for i in cutlass.range_constexpr(TILE // 4):
                    score = flat[TILE // 4 + i]
                    powers[i] = cute.math.exp2(cute.math.fma(score, scale, -base[i // 2 % 2]), fastmath=True)
            for i in cutlass.range_constexpr(TILE // 32):
                words = [pack(powers[8 * i + 2 * j], powers[8 * i + 2 * j + 1], self.dtype) for j in range(4)]
                vector = half * (TILE // 16) + 2 * i + lane // 16
                store_matrices(start + 2 * swizzled(row, vector), words)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(exchange.p_full + (2 * slot + half))
            for i in cutlass.range_constexpr(TILE // 4):
                total[i // 2 % 2] += powers[i]
        self.tiles.release(rings.rope_empty + rope)
        return advance(slot, phase, P_SLOTS)

    @cute.jit
    def accumulate(
        self,
        out,
        out_parts,
        value_mma,
        units,
        rings: LatentRings,
        exchange: Exchange,
        tile: RowTile,
        tid,
        warp,
        lane,
        side,
    ):
        thr = value_mma.get_slice(tid)
        values = cute.make_tensor(units.iterator, cute.select(units.layout, mode=[1, 0, 2]))
        rp = value_mma.make_fragment_A(thr.partition_A(exchange.p))
        rv = value_mma.make_fragment_B(thr.partition_B(values))
        flat = cute.make_rmem_tensor((HALF // 2,), Float32)
        of_unit = cute.make_layout(thr.partition_shape_C((ROWS, UNIT)))
        accs = [cute.make_tensor(flat.iterator + half * (UNIT // 2), of_unit) for half in range(2)]
        own_row = warp * 16 + lane // 4
        end_phase, at, facts_phase, sequence = Int32(0), Int32(0), Int32(0), Int32(0)
        unit, slot, phase, scored_phase = Int32(side), Int32(0), Int32(0), Int32(0)
        value_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        while sequence >= 0:
            cute.arch.mbarrier_wait(rings.facts_full + at, facts_phase)
            sequence, tiles, part = rings.facts[SEQUENCE, at], rings.facts[TILES, at], rings.facts[PART, at]
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.facts_empty + at)
            at, facts_phase = advance(at, facts_phase, FACTS)
            if sequence >= 0:
                flat.fill(0.0)
                used = slot
                for n in cutlass.range(tiles, unroll=1):
                    cute.arch.mbarrier_wait(exchange.p_full + 2 * slot, phase)
                    upper, lower = exchange.factors[own_row, slot], exchange.factors[own_row + 8, slot]
                    if cute.arch.vote_any_sync(upper != 1.0 or lower != 1.0):
                        for i in cutlass.range_constexpr(HALF // 2):
                            flat[i] *= lower if i // 2 % 2 else upper
                    cute.nvgpu.warpgroup.fence()
                    for half in cutlass.range_constexpr(2):
                        if const_expr(half == 1):
                            scored_phase ^= 1
                            if n < tiles - 1:
                                cute.arch.mbarrier_wait(exchange.scored, scored_phase)  # of the next tile
                        for step in cutlass.range_constexpr(TILE // 16):
                            if const_expr(half == 0 and step == TILE // 32):
                                cute.arch.mbarrier_wait(exchange.p_full + (2 * slot + 1), phase)
                            a, b = rp[None, None, step, slot], rv[None, None, step, unit]
                            cute.gemm(value_mma, accs[half], a, b, accs[half])
                        cute.nvgpu.warpgroup.commit_group()
                        cute.nvgpu.warpgroup.wait_group(0)
                        self.tiles.release(rings.unit_empty + unit)
                        unit = unit + 2 - UNITS if unit >= UNITS - 2 else unit + 2
                    if n < tiles - 1:
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(exchange.p_empty + slot)
                    used = slot
                    slot, phase = advance(slot, phase, P_SLOTS)
                cute.arch.mbarrier_wait(exchange.end_full, end_phase)
                upper, lower = exchange.inverses[own_row], exchange.inverses[own_row + 8]
                row = computed_here(tile.first + own_row)
                rows = [cutlass.min(row + 8 * r, tile.rows - 1) for r in range(2)]
                if part >= 0:
                    targets = [out_parts[part, tile.kv_head, rows[r], None] for r in range(2)]
                    self.store_partial(flat, upper, lower, targets, tile.rows - row, side, lane)
                else:
                    targets = []
                    for r in cutlass.range_constexpr(2):
                        head = tile.kv_head * tile.heads + rows[r] % tile.heads
                        targets.append(out[sequence, rows[r] // tile.heads, head, None])
                    staging = cute.recast_ptr(exchange.p.iterator, cute.make_swizzle(0, 4, 3), dtype=self.dtype)
                    staging += used * (ROWS * TILE) + (side * 4 + warp) * 16 * STAGED
                    # Both have read P.
                    cute.arch.barrier(barrier_id=OUTPUT_BARRIER, number_of_threads=2 * WARPGROUP)
                    self.store(flat, upper, lower, targets, tile.rows - row, staging, side, lane)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(exchange.end_empty)
                    if tiles > 0:
                        cute.arch.mbarrier_arrive(exchange.p_empty + used)
                end_phase ^= 1

    @cute.jit
    def store(self, flat, upper, lower, targets, rows, staging, side, lane):
        """16 rows of a half to the result, by way of 1 KiB of P's memory. `rows`: from the lane's first to the last."""
        vector = cute.make_rmem_tensor((8,), self.dtype)
        for i in cutlass.range_constexpr(HALF // STAGED):
            for j in cutlass.range_constexpr(2):
                at = (4 * i + 2 * j) * 4
                words = []
                for n in cutlass.range_constexpr(4):
                    inverse = lower if const_expr(n % 2) else upper
                    words.append(pack(flat[at + 2 * n] * inverse, flat[at + 2 * n + 1] * inverse, self.dtype))
                place = self.staged(lane % 16, 2 * j + lane // 16)
                store_matrices(Int32((staging + place).toint()), words)
            cute.arch.sync_warp()
            for r in cutlass.range_constexpr(2):
                source = cute.make_tensor(staging + self.staged(lane // 4 + 8 * r, lane % 4), cute.make_layout(8))
                cute.autovec_copy(source, vector)
                if 8 * r < rows:
                    place = side * (HALF // 8) + i * (STAGED // 8) + lane % 4
                    cute.autovec_copy(vector, cute.local_tile(targets[r], (8,), (place,)))
            cute.arch.sync_warp()

    @cute.jit
    def staged(self, row, vector):
        """Of 8 numbers, in 16 rows of 32."""
        return row * STAGED + (vector ^ (row // 2 % 4)) * 8

    @cute.jit
    def store_partial(self, flat, upper, lower, targets, rows, side, lane):
        """16 rows of a half to a partial result, in fp32."""
        pair = cute.make_rmem_tensor((2,), Float32)
        for i in cutlass.range_constexpr(HALF // 8):
            for r in cutlass.range_constexpr(2):
                inverse = lower if const_expr(r) else upper
                pair[0], pair[1] = flat[4 * i + 2 * r] * inverse, flat[4 * i + 2 * r + 1] * inverse
                if 8 * r < rows:
                    place = side * (HALF // 2) + 4 * i + lane % 4
                    cute.autovec_copy(pair, cute.local_tile(targets[r], (2,), (place,)))


@cached
def compile_mla_decode(dtype: str, box: int, cluster: int):
    """-> f(q [B, s_q, h_q, 576], cache [pages, P, h_k, 576], block_table [B, max_pages], lengths [B], plan [parts, 8],
    num_splits [B + 1], out [B, s_q, h_q, 512], lse [B, h_q, s_q], out_parts [slots, h_k, rows, 512], lse_parts
    [slots, h_k, rows], scale * log2(e), causal, capacity, fixed_splits); B, s_q, pages, max_pages > 0; h_k divides h_q,
    P is a multiple of `box`, the row tiles are one of `cluster`; rows of q and cache start at multiples of 16 bytes."""
    return compile_sm90(MlaDecodeSm90(cute_dtype(dtype), box, cluster), *decode_arguments(dtype))


def decode_arguments(dtype: str) -> tuple:
    """Fake arguments of a decoding kernel."""
    kind = cute_dtype(dtype)

    def fake(dtype, shape, stride, align):
        return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)

    def strides(count, divisibility):
        return tuple(cute.sym_int64(divisibility=divisibility) for _ in range(count))

    batch, queries, heads, kv_heads, slots = (cute.sym_int() for _ in range(5))
    rows = cute.sym_int()
    return (
        fake(kind, (batch, queries, heads, LATENT), (*strides(3, 8), 1), 16),
        fake(kind, (cute.sym_int(), cute.sym_int(), kv_heads, LATENT), (*strides(3, 8), 1), 16),
        fake(Int32, (batch, cute.sym_int()), (*strides(1, 1), 1), 4),
        fake(Int32, (batch,), strides(1, 1), 4),
        fake(Int32, (cute.sym_int(), 8), (8, 1), 4),
        fake(Int32, (cute.sym_int(),), (1,), 4),
        fake(kind, (batch, queries, heads, VALUE), (*strides(2, 8), VALUE, 1), 16),
        fake(Float32, (batch, heads, queries), (*strides(2, 1), 1), 4),
        fake(Float32, (slots, kv_heads, rows, VALUE), (*strides(2, 4), VALUE, 1), 16),
        fake(Float32, (slots, kv_heads, rows), (*strides(2, 1), 1), 4),
        *(Float32(0.0), Int32(0), Int32(0), Int32(0)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def cluster_of(rows: int) -> int:
    """CTAs that share the keys; `rows`: query tokens x heads of a KV head."""
    return 2 if -(-rows // ROWS) % 2 == 0 else 1


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_mla_decode, (dtype, box, cluster))
        for dtype in ("bfloat16", "float16")
        for box in (16, 32, 64)
        for cluster in (1, 2)
    ]
