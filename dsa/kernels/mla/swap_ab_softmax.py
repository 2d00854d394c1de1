"""Softmax of scores whose columns are heads: S^T of 64 keys to P^T, for the warpgroups that score.

P is relative to a maximum that may lag behind the true one by a factor of 2^LAG: a barrier asks all lanes whether it
does by more; only then is the maximum of the columns, which lie in all warps, found. Of two warpgroups that score, one
looks at the maxima after the other, in the order of the tiles, and both have sums of their own.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from dsa.cute.shared_memory import pack, store_matrices
from dsa.cute.sm90 import opaque
from dsa.kernels.mla.fp8_kv_scale_table import ROOM
from dsa.kernels.mla.group_vote import any_of_group
from dsa.kernels.mla.mla_attention import LAG, LN2, NOTHING, WARPGROUP, Piece, Results
from dsa.kernels.mla.mla_tiles import TILE
from dsa.kernels.mla.swap_ab_exchange import Exchange, Thread

# Barriers: of all that score, of a warpgroup, and of its votes.
ALL_BARRIER, BARRIER, VOTE_BARRIER = 1, 2, 4
# Of bytes P is at most 2^(LAG + RAISED), which f16 has, so that what is 2^-31 of the largest is more than 0.
RAISED = 7.0


@cute.jit
def power_of_two(exponent: Int32) -> Float32:
    return ((exponent + 127) << 23).bitcast(Float32)


@cute.jit
def spread_key(row):
    """Which key of eight is row `row` of the products: neighbours four apart, so that they lie in different banks."""
    return (row >> 1) + ((row & 1) << 2)


class ColumnSoftmax:
    """`rows` heads of a query, 16, 32 or 64, and so many scoring warpgroups.

    p_dtype  of P
    powers   keys come with a power of two each, which P is multiplied by and which its sums are without; then eight
             keys are in the order of `spread_key`, and O is to be divided by 2^ROOM, too
    highest  max_logits are wanted
    """

    def __init__(self, rows: int, scorers: int, p_dtype: type[cutlass.Numeric], powers: bool, highest: bool = False):
        self.rows, self.scorers, self.p_dtype = rows, scorers, p_dtype
        self.powers, self.highest = powers, highest
        self.own = rows // 4  # columns of a lane
        self.raised = RAISED if powers else 0.0

    @cute.jit
    def key_of(self, row):
        """Which key of eight is row `row` of the products."""
        if const_expr(self.powers):
            row = spread_key(row)
        return row

    def number(self, thread: Thread):
        """Of the thread, among those that score."""
        return thread.side * WARPGROUP + thread.tid

    def meet(self, thread: Thread):
        cute.arch.barrier(barrier_id=BARRIER + thread.side, number_of_threads=WARPGROUP)

    def meet_all(self):
        cute.arch.barrier(barrier_id=ALL_BARRIER, number_of_threads=self.scorers * WARPGROUP)

    @cute.jit
    def begin(self, exchange: Exchange, thread: Thread):
        """Of a piece. To be followed by `meet_all`."""
        zeros = cute.make_rmem_tensor((4,), Float32)
        zeros.fill(0.0)
        if thread.side == 0 and thread.tid < self.rows:
            exchange.tops[thread.tid] = Float32(NOTHING)
        for i in cutlass.range_constexpr(self.own // 4):
            cute.autovec_copy(zeros, exchange.totals[None, self.number(thread), i])

    @cute.jit
    def softmax(self, flat, exchange: Exchange, there, powers, exponents, peaks, scale, slot, phase, thread: Thread):
        """P^T of a tile's scores to shared memory, and what O^T must be multiplied by before.

        there: a bit for each of the warp's keys; (slot, phase): of P; powers: of the lane's two keys, if they have any,
        and exponents, the same as numbers; peaks: of the lane's columns the highest of its scores, if they are wanted
        """
        lane, number = opaque(thread.lane), opaque(self.number(thread))
        tops = cute.make_tensor(
            exchange.tops.iterator + (lane & 3) * 2, cute.make_layout((2, self.rows // 8), stride=(1, 8))
        )
        pair = cute.make_rmem_tensor((2,), Float32)
        # In place: in powers of two, with the key's own.
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(self.own):
                at = i // 2 * 4 + 2 * r + i % 2
                flat[at] = cute.math.fma(flat[at], scale, exponents[r]) if self.powers else flat[at] * scale
        if there != 0xFFFF:
            for r in cutlass.range_constexpr(2):
                if (there >> Uint32(8 * r + self.key_of(lane >> 2))) & 1 == 0:
                    for i in cutlass.range_constexpr(self.own):
                        flat[i // 2 * 4 + 2 * r + i % 2] = -Float32(float("inf"))
        if const_expr(self.highest):
            for c in cutlass.range_constexpr(self.own):
                at = c // 2 * 4 + c % 2
                peaks[c] = cute.arch.fmax(peaks[c], cute.arch.fmax(flat[at], flat[at + 2]))
        if const_expr(self.scorers > 1):
            # The first has the first turn.
            cute.arch.mbarrier_wait(exchange.turns + slot, phase ^ 1 ^ thread.side)
            self.scale_totals(exchange, slot ^ 1, thread)
        most = -Float32(float("inf"))
        for n in cutlass.range_constexpr(self.rows // 8):
            cute.autovec_copy(tops[None, n], pair)
            for i in cutlass.range_constexpr(2):
                most = cute.arch.fmax(most, cute.arch.fmax(flat[4 * n + i], flat[4 * n + 2 + i]) - pair[i])
        rises = any_of_group(most > LAG + self.raised, VOTE_BARRIER + thread.side, WARPGROUP)
        if rises:
            self.raise_tops(flat, exchange, slot, thread)
        if thread.warp == 0:
            with cute.arch.elect_one():
                exchange.changed[slot] = Int32(1) if rises else Int32(0)
        if rises:
            self.meet(thread)
            self.scale_totals(exchange, slot, thread)
        own_tops = tops
        if const_expr(self.scorers > 1):
            own_tops = cute.make_rmem_tensor((2, self.rows // 8), Float32)
            for n in cutlass.range_constexpr(self.rows // 8):
                cute.autovec_copy(tops[None, n], own_tops[None, n])
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(exchange.turns + (slot ^ 1))
        start = Int32(exchange.p.iterator.toint()) + slot * (2 * TILE * self.rows)
        # Lane 8 i + r gives the address of row r of matrix i: two of keys, then two of heads.
        key = thread.warp * 16 + (lane & 8) + self.key_of(lane & 7)
        total = cute.make_rmem_tensor((4,), Float32)
        without = [power_of_two(-power) for power in powers] if self.powers else [Float32(1.0)] * 2
        for j in cutlass.range_constexpr(self.rows // 16):
            weights = []
            cute.autovec_copy(exchange.totals[None, number, j], total)
            for i in cutlass.range_constexpr(8):
                if const_expr(i % 4 == 0):
                    cute.autovec_copy(own_tops[None, 2 * j + i // 4], pair)
                weight = cute.math.exp2(flat[8 * j + i] - pair[i % 2], fastmath=True)
                at = i // 4 * 2 + i % 2
                total[at] = cute.math.fma(weight, without[i // 2 % 2], total[at])
                weights.append(weight)
            cute.autovec_copy(total, exchange.totals[None, number, j])
            words = [pack(weights[2 * i], weights[2 * i + 1], self.p_dtype) for i in range(4)]
            offset = key * (2 * self.rows) + (2 * j + (lane >> 4)) * 16
            store_matrices(start + (offset ^ ((offset >> 3) & (2 * self.rows - 16))), words)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(exchange.p_full + slot)

    @cute.jit
    def scale_totals(self, exchange: Exchange, slot, thread: Thread):
        """The thread's sums as the tile of P's slot changed the tops, if it did."""
        lane, number = opaque(thread.lane), opaque(self.number(thread))
        if exchange.changed[slot] != 0:
            total = cute.make_rmem_tensor((4,), Float32)
            for j in cutlass.range_constexpr(self.own // 4):
                cute.autovec_copy(exchange.totals[None, number, j], total)
                for i in cutlass.range_constexpr(4):
                    total[i] *= exchange.factors[16 * j + i // 2 * 8 + (lane & 3) * 2 + i % 2, slot]
                cute.autovec_copy(total, exchange.totals[None, number, j])

    @cute.jit
    def raise_tops(self, flat, exchange: Exchange, slot, thread: Thread):
        """The true maxima of the columns where they exceed the tops by too much, and the factors that follow."""
        tid, highest_of = opaque(thread.tid), cute.make_rmem_tensor((self.own,), Float32)
        for c in cutlass.range_constexpr(self.own):
            highest_of[c] = cute.arch.fmax(flat[c // 2 * 4 + c % 2], flat[c // 2 * 4 + 2 + c % 2])
        self.columns_of(exchange, highest_of, thread)
        self.meet(thread)
        if tid < self.rows:
            highest = exchange.columns[tid, thread.side * 4]
            for w in cutlass.range_constexpr(1, 4):
                highest = cute.arch.fmax(highest, exchange.columns[tid, thread.side * 4 + w])
            highest -= self.raised
            factor, top = Float32(1.0), exchange.tops[tid]
            if highest > top + LAG:
                factor = cute.math.exp2(top - highest, fastmath=True)
                exchange.tops[tid] = highest
            exchange.factors[tid, slot] = factor

    @cute.jit
    def finish(
        self, results: Results, exchange: Exchange, piece: Piece, rows, group, parts, pieces, peaks, thread: Thread
    ):
        """LSE of the piece's rows, and what O^T is to be multiplied by; parts: tiles that have been scored."""
        first_row, heads = rows
        lane, tid, number = opaque(thread.lane), opaque(thread.tid), self.number(thread)
        if const_expr(self.scorers > 1):
            self.meet_all()
            if (parts & 1) == thread.side:
                # The last tile was the other's.
                self.scale_totals(exchange, thread.side ^ 1, thread)
        for c in cutlass.range_constexpr(self.own):
            amount = exchange.totals[c % 4, number, c // 4]
            for log in cutlass.range_constexpr(2, 5):
                amount += cute.arch.shuffle_sync_bfly(amount, offset=1 << log)
            if lane >> 2 == 0:
                exchange.columns[c // 2 * 8 + (lane & 3) * 2 + c % 2, thread.side * 4 + thread.warp] = amount
        self.meet_all()
        if thread.side == 0:
            cute.arch.mbarrier_wait(exchange.end_empty, ~pieces & 1)
            if tid < self.rows:
                # The warps of the piece's first tile first: the sum shall not depend on what was before the piece.
                turned = 4 * (parts - piece.tiles & self.scorers - 1)
                amount = exchange.columns[tid, turned]
                for w in cutlass.range_constexpr(1, 4 * self.scorers):
                    amount += exchange.columns[tid, w ^ turned]
                inverse, result = Float32(0.0), Float32(float("inf"))
                if piece.part >= 0:
                    result = -Float32(float("inf"))
                if amount != 0.0:
                    whole, top = amount, exchange.tops[tid]
                    if piece.part < 0:
                        whole += cute.math.exp2(results.sink[tid] - top)
                    inverse = (2.0**-ROOM if self.powers else 1.0) / whole
                    result = (top + cute.math.log2(amount)) * LN2
                exchange.inverses[tid] = inverse
                row = first_row + tid
                if row < heads:
                    if piece.part >= 0:
                        results.lse_parts[piece.part, 0, row] = result
                    else:
                        sequence, query = divmod(piece.sequence, group)
                        results.lse[sequence, row, query] = result
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(exchange.end_full)
        if const_expr(self.highest):
            # The sums have been read.
            self.meet_all()
            self.columns_of(exchange, peaks, thread)
            self.meet_all()
            if tid < self.rows and first_row + tid < heads:
                peak = exchange.columns[tid, 0]
                for w in cutlass.range_constexpr(1, 4 * self.scorers):
                    peak = cute.arch.fmax(peak, exchange.columns[tid, w])
                results.max_logits[piece.sequence, first_row + tid] = peak * LN2

    @cute.jit
    def columns_of(self, exchange: Exchange, values, thread: Thread):
        """The warp's maxima of its lanes' values of columns."""
        lane = opaque(thread.lane)
        for c in cutlass.range_constexpr(self.own):
            value = values[c]
            for log in cutlass.range_constexpr(2, 5):
                value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1 << log))
            if lane >> 2 == 0:
                exchange.columns[c // 2 * 8 + (lane & 3) * 2 + c % 2, thread.side * 4 + thread.warp] = value
