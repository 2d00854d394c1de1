"""Attention over tiles of latents: what the warpgroups that score and that accumulate do.

o[r] = softmax_j(scale * q[r] . k[j]) k[j, :512], 64 rows r of one sequence and KV head, keys of 576 or 512 channels

- One warpgroup scores: S = Q K^T by wgmma, `held` of the chunks of Q in registers, online softmax in registers, P in 16
  bits to shared memory. Two warpgroups accumulate: each has 64 x 256 of O += P V. The fourth loads the keys.
- While a tile's softmax is computed, no scores are under way, and its P is not there yet. So that the tensor cores have
  work then, half of the last tile's O += P V waits until this tile has been scored. Also P comes in two halves of the
  keys, the first before the second's powers are computed.
- The maximum that P is relative to may lag behind the true one by a factor of 2^8: O is rescaled only when it must be,
  and powers are computed without waiting for the tile's maximum.
- A piece that is a whole sequence writes its results; others write partial results, normalised, to be combined.
Registers: SCORE + 2 x OUTPUT + LOADER = 512 a lane: 32 scores and 16 a chunk of Q; 128 of O. A wgmma of 256 columns,
with its 128 accumulators, cannot be compiled for 512 threads: O += P V is in units of 128.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.pipeline import advance
from dsa.cute.shared_memory import pack, store_matrices, swizzled
from dsa.cute.sm90 import opaque
from dsa.kernels.mla.mla_queries import ROWS
from dsa.kernels.mla.mla_tiles import (
    CHUNK,
    FACTS,
    FIRST_TILE,
    LENGTH,
    PART,
    ROPE_AFTER,
    SEEN,
    SEQUENCE,
    TILE,
    TILE_UNITS,
    TILES,
    UNIT,
    UNIT_CHUNKS,
    VALUE,
    LatentMemory,
    LatentRings,
    chunk_order,
)

WARPGROUP = 128
THREADS = 4 * WARPGROUP
SCORE_REGISTERS, OUTPUT_REGISTERS, LOADER_REGISTERS = 152, 160, 40
HALF = VALUE // 2
LAG = 8.0  # the most, in powers of two, that P may exceed 1 by
NOTHING = -3e38  # finite, so that a difference to it is no NaN
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

    @cute.jit
    def init(self):
        """Barriers. One thread's work."""
        for i in cutlass.range_constexpr(P_SLOTS):
            cute.arch.mbarrier_init(self.p_full + 2 * i, 4)
            cute.arch.mbarrier_init(self.p_full + (2 * i + 1), 4)
            cute.arch.mbarrier_init(self.p_empty + i, 8)
        cute.arch.mbarrier_init(self.scored, 4)
        cute.arch.mbarrier_init(self.end_full, 4)
        cute.arch.mbarrier_init(self.end_empty, 8)


@dataclass(frozen=True)
class RowTile:
    """Rows first to first + 63 of the `rows` of a KV head: of `queries` queries with `heads` heads each. Of a kernel
    whose pieces are of single queries: `queries` of a sequence, to divide by."""

    queries: Int32 | cute.FastDivmodDivisorV2
    heads: Int32
    rows: Int32
    first: Int32
    kv_head: Int32
    causal: Int32


@dataclass(frozen=True)
class Piece:
    """See LatentRings.facts."""

    sequence: Int32
    first: Int32
    tiles: Int32
    part: Int32
    length: Int32
    seen: Int32


@dataclass(frozen=True)
class Results:
    """out [B, s_q, h_q, 512], lse [B, h_q, s_q], out_parts [slots, h_k, rows, 512], lse_parts [slots, h_k, rows]; and
    where a kernel has them: max_logits [B, h_q] of s_q 1, if all pieces are whole; and in shared memory the sinks of
    the CTA's rows, in powers of two [64]."""

    out: cute.Tensor
    lse: cute.Tensor
    out_parts: cute.Tensor
    lse_parts: cute.Tensor
    max_logits: cute.Tensor | None = None
    sink: cute.Tensor | None = None


@dataclass(frozen=True)
class SoftmaxState:
    """Of a lane's two rows: how many keys they see, the maximum that P is relative to, in powers of two (NOTHING while
    there is none), the lane's part of the sum, and the true maximum."""

    limits: cute.Tensor
    top: cute.Tensor
    total: cute.Tensor
    highest: cute.Tensor


class LatentAttention:
    """`channels` of a key, 576 or 512, in `memory`; `held` chunks of Q in registers; `highest`: max_logits, too.

    A kernel says by `begin` and `hide` which keys a row sees, and how the queries come.
    """

    queries_in_ring = False  # each piece's queries come by the rings, as a tile of its own before the keys'

    def __init__(self, memory: LatentMemory, channels: int, held: int, highest: bool = False):
        self.dtype, self.memory, self.held, self.highest = memory.dtype, memory, held, highest
        self.free = channels // CHUNK - held
        self.order = chunk_order(channels)

    def multiplications(self) -> tuple[cute.TiledMma, cute.TiledMma, cute.TiledMma]:
        """Scores with Q in shared memory and in registers, and O += P V."""
        k_major, mn_major = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN
        registers = cute.nvgpu.warpgroup.OperandSource.RMEM
        make, one = sm90.make_trivial_tiled_mma, (1, 1, 1)
        return (
            make(self.dtype, self.dtype, k_major, k_major, Float32, one, (ROWS, TILE)),
            make(self.dtype, self.dtype, k_major, k_major, Float32, one, (ROWS, TILE), registers),
            make(self.dtype, self.dtype, k_major, mn_major, Float32, one, (ROWS, UNIT)),
        )

    def q_layout(self) -> cute.ComposedLayout:
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, TILE, self.free * CHUNK), self.dtype, 1)

    def p_layout(self) -> cute.ComposedLayout:
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (ROWS, TILE, TILE), self.dtype, P_SLOTS)

    def exchange_storage(self) -> type:
        @cute.struct
        class ExchangeStorage:
            p_full: cute.struct.MemRange[Int64, 2 * P_SLOTS]
            p_empty: cute.struct.MemRange[Int64, P_SLOTS]
            scored: cute.struct.MemRange[Int64, 1]
            end_full: cute.struct.MemRange[Int64, 1]
            end_empty: cute.struct.MemRange[Int64, 1]
            factors: cute.struct.MemRange[Float32, ROWS * P_SLOTS]
            inverses: cute.struct.MemRange[Float32, ROWS]
            p: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(self.p_layout())], 1024]

        return ExchangeStorage

    def exchange(self, storage) -> Exchange:
        layout = self.p_layout()
        return Exchange(
            storage.p.get_tensor(layout.outer, swizzle=layout.inner),
            storage.p_full.data_ptr(),
            storage.p_empty.data_ptr(),
            storage.factors.get_tensor(cute.make_layout((ROWS, P_SLOTS))),
            storage.scored.data_ptr(),
            storage.inverses.get_tensor(cute.make_layout(ROWS)),
            storage.end_full.data_ptr(),
            storage.end_empty.data_ptr(),
        )

    @cute.jit
    def multiply(self, acc, score_mma, held_mma, held, rq, ru, rr, rings: LatentRings, ring):
        """Start acc = Q K^T of the next tile, as its parts arrive. -> the ring behind the tile."""
        unit, unit_phase, rope, rope_phase = ring
        cute.nvgpu.warpgroup.fence()
        for n, chunk in enumerate(self.order):
            if const_expr(n == ROPE_AFTER * UNIT_CHUNKS):
                cute.arch.mbarrier_wait(rings.rope_full + rope, rope_phase)
            if const_expr(chunk < VALUE // CHUNK):
                cute.arch.mbarrier_wait(rings.unit_full + (unit * UNIT_CHUNKS + chunk % UNIT_CHUNKS), unit_phase)
            own_unit, own_rope = opaque(unit), opaque(rope)
            for step in cutlass.range_constexpr(CHUNK // 16):
                keys = rr[None, None, step, own_rope]
                if const_expr(chunk < VALUE // CHUNK):
                    keys = ru[None, None, chunk % UNIT_CHUNKS * (CHUNK // 16) + step, own_unit]
                if const_expr(n < self.held):
                    held_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, n + step > 0)
                    cute.gemm(held_mma, acc, held[None, None, step, n], keys, acc)
                else:
                    score_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, n + step > 0)
                    at = (n - self.held) * (CHUNK // 16) + step
                    cute.gemm(score_mma, acc, rq[None, None, at, 0], keys, acc)
            if const_expr(chunk < VALUE // CHUNK and chunk % UNIT_CHUNKS == UNIT_CHUNKS - 1):
                unit, unit_phase = advance(unit, unit_phase, self.memory.units)
        cute.nvgpu.warpgroup.commit_group()
        rope, rope_phase = advance(rope, rope_phase, self.memory.ropes)
        return unit, unit_phase, rope, rope_phase

    @cute.jit
    def request_queries(self, q, sq, held, sequence, tile: RowTile, tid, warp, lane):
        """The next piece is of this sequence."""

    @cute.jit
    def take_queries(self, sq, held, units, ropes, rings: LatentRings, ring, tid, warp, lane):
        """The piece's queries to registers and shared memory. -> the ring behind them, if they came by it."""
        raise NotImplementedError

    @cute.jit
    def place(self, sequence, tile: RowTile, row):
        """(sequence, query, head) of a row of a piece, in the results."""
        raise NotImplementedError

    @cute.jit
    def begin(self, state: SoftmaxState, piece: Piece, tile: RowTile, own_row):
        """What the rows of a lane, own_row and 8 further, see of a piece: for `hide`."""

    @cute.jit
    def hide(
        self, flat, state: SoftmaxState, rings: LatentRings, units, ring, piece: Piece, tile: RowTile, key, tid, lane
    ):
        """Set the scores of keys, the first of which is number `key`, that a row does not see to minus infinity."""
        raise NotImplementedError

    @cute.jit
    def score(
        self,
        q,
        results: Results,
        score_mma,
        held_mma,
        sq,
        units,
        ropes,
        rings: LatentRings,
        exchange: Exchange,
        tile: RowTile,
        scale,
        tid,
        warp,
        lane,
    ):
        """The scoring warpgroup: all pieces of this CTA."""
        thr = score_mma.get_slice(tid)
        rq = score_mma.make_fragment_A(thr.partition_A(sq))
        ru = score_mma.make_fragment_B(thr.partition_B(units))
        rr = score_mma.make_fragment_B(thr.partition_B(ropes))
        held_shape = held_mma.get_slice(tid).partition_shape_A((ROWS, CHUNK))
        held = cute.make_rmem_tensor((*held_shape, self.held), self.dtype)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((ROWS, TILE)), Float32)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(TILE // 2))
        own_row = warp * 16 + lane // 4  # and 8 further
        numbers = [cute.make_rmem_tensor((2,), dtype) for dtype in (Int32, *[Float32] * 3)]
        state = SoftmaxState(*numbers)
        ring = (Int32(0), Int32(0), Int32(0), Int32(0))
        place = (Int32(0), Int32(0))  # of P
        end_phase, at, facts_phase, sequence = Int32(0), Int32(0), Int32(0), Int32(0)
        while sequence >= 0:
            cute.arch.mbarrier_wait(rings.named + at, facts_phase)
            sequence = rings.facts[SEQUENCE, at]
            if sequence >= 0:
                self.request_queries(q, sq, held, sequence, tile, tid, warp, lane)
            cute.arch.mbarrier_wait(rings.facts_full + at, facts_phase)
            piece = Piece(sequence, *[rings.facts[i, at] for i in (FIRST_TILE, TILES, PART, LENGTH, SEEN)])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.facts_empty + at)
            at, facts_phase = advance(at, facts_phase, FACTS)
            if sequence >= 0:
                self.begin(state, piece, tile, own_row)
                state.top.fill(NOTHING)
                state.total.fill(0.0)
                state.highest.fill(-float("inf"))
                ring = self.take_queries(sq, held, units, ropes, rings, ring, tid, warp, lane)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)
                key = piece.first * TILE
                for _ in cutlass.range(piece.tiles, unroll=1):
                    here = ring
                    ring = self.multiply(acc, score_mma, held_mma, held, rq, ru, rr, rings, ring)
                    place = self.softmax(
                        flat, state, exchange, rings, units, here, piece, tile, key, scale, place, tid, warp, lane
                    )
                    key += TILE
                cute.arch.mbarrier_wait(exchange.end_empty, end_phase ^ 1)
                for r in cutlass.range_constexpr(2):
                    row = opaque(tile.first + own_row + 8 * r)
                    amount = state.total[r] + cute.arch.shuffle_sync_bfly(state.total[r], offset=1)
                    amount += cute.arch.shuffle_sync_bfly(amount, offset=2)
                    self.finish(results, exchange, piece, tile, own_row + 8 * r, row, amount, state, r, lane)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(exchange.end_full)
                end_phase ^= 1

    @cute.jit
    def finish(
        self,
        results: Results,
        exchange: Exchange,
        piece: Piece,
        tile: RowTile,
        own_row,
        row,
        amount,
        state: SoftmaxState,
        r: cutlass.Constexpr,
        lane,
    ):
        """LSE and the like of a row, and what O is to be multiplied by. amount: the sum of its powers."""
        inverse, result = Float32(0.0), Float32(float("inf"))
        if piece.part >= 0:
            result = -Float32(float("inf"))
        if amount != 0.0:
            whole = amount
            if const_expr(results.sink is not None):
                if piece.part < 0:
                    whole += cute.math.exp2(results.sink[own_row] - state.top[r])
            inverse = 1.0 / whole
            result = state.top[r] * LN2 + cute.math.log(amount)
        if lane % 4 == 0:
            exchange.inverses[own_row] = inverse
            if row < tile.rows:
                if piece.part >= 0:
                    results.lse_parts[piece.part, tile.kv_head, row] = result
                else:
                    sequence, query, head = self.place(piece.sequence, tile, row)
                    results.lse[sequence, head, query] = result
                    if const_expr(self.highest):
                        results.max_logits[piece.sequence, row] = state.highest[r] * LN2

    @cute.jit
    def softmax(
        self,
        flat,
        state: SoftmaxState,
        exchange: Exchange,
        rings: LatentRings,
        units,
        ring,
        piece: Piece,
        tile: RowTile,
        key,
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
        top, total = state.top, state.total
        slot, phase = place
        cute.arch.mbarrier_wait(exchange.p_empty + slot, phase ^ 1)
        cute.nvgpu.warpgroup.wait_group(0)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(exchange.scored)
        self.hide(flat, state, rings, units, ring, piece, tile, key, tid, lane)
        powers = cute.make_rmem_tensor((TILE // 4,), Float32)
        for i in cutlass.range_constexpr(TILE // 4):
            powers[i] = cute.math.exp2(cute.math.fma(flat[i], scale, -top[i // 2 % 2]), fastmath=True)
        highest, changed = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
        changed.fill(1.0)
        for r in cutlass.range_constexpr(2):
            value = flat[2 * r]
            for i in cutlass.range_constexpr(1, TILE // 4):
                value = cute.arch.fmax(value, flat[i // 2 * 4 + 2 * r + i % 2])
            value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1))
            highest[r] = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2)) * scale
            if const_expr(self.highest):
                state.highest[r] = cute.arch.fmax(state.highest[r], highest[r])
        if cute.arch.vote_any_sync(highest[0] > top[0] + LAG or highest[1] > top[1] + LAG):
            for r in cutlass.range_constexpr(2):
                if highest[r] > top[r] + LAG:
                    changed[r] = cute.math.exp2(top[r] - highest[r], fastmath=True)
                    top[r] = highest[r]
                    total[r] *= changed[r]
            for i in cutlass.range_constexpr(TILE // 4):
                powers[i] = cute.math.exp2(cute.math.fma(flat[i], scale, -top[i // 2 % 2]), fastmath=True)

        if lane % 4 == 0:
            exchange.factors[warp * 16 + lane // 4, slot] = changed[0]
            exchange.factors[warp * 16 + lane // 4 + 8, slot] = changed[1]
        start = Int32(exchange.p.iterator.toint()) + slot * (ROWS * TILE * 2)
        row = warp * 16 + lane % 16
        for half in cutlass.range_constexpr(2):
            if const_expr(half == 1):
                for i in cutlass.range_constexpr(TILE // 4):
                    score = flat[TILE // 4 + i]
                    powers[i] = cute.math.exp2(cute.math.fma(score, scale, -top[i // 2 % 2]), fastmath=True)
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
        self.memory.release(rings.rope_empty + ring[2])
        return advance(slot, phase, P_SLOTS)

    @cute.jit
    def accumulate(
        self,
        results: Results,
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
        """An accumulating warpgroup, number `side`: its half of the channels, all pieces of this CTA."""
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
                if const_expr(self.queries_in_ring):
                    unit = (
                        unit + TILE_UNITS - self.memory.units
                        if unit >= self.memory.units - TILE_UNITS
                        else unit + TILE_UNITS
                    )
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
                        self.memory.release(rings.unit_empty + unit)
                        unit = unit + 2 - self.memory.units if unit >= self.memory.units - 2 else unit + 2
                    if n < tiles - 1:
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(exchange.p_empty + slot)
                    used = slot
                    slot, phase = advance(slot, phase, P_SLOTS)
                cute.arch.mbarrier_wait(exchange.end_full, end_phase)
                upper, lower = exchange.inverses[own_row], exchange.inverses[own_row + 8]
                row = opaque(tile.first + own_row)
                rows = [cutlass.min(row + 8 * r, tile.rows - 1) for r in range(2)]
                if part >= 0:
                    targets = [results.out_parts[part, tile.kv_head, rows[r], None] for r in range(2)]
                    self.store_partial(flat, upper, lower, targets, tile.rows - row, side, lane)
                else:
                    targets = []
                    for r in cutlass.range_constexpr(2):
                        whose, query, head = self.place(sequence, tile, rows[r])
                        targets.append(results.out[whose, query, head, None])
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
