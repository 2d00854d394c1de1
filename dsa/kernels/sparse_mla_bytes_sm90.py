"""Sparse MLA attention over selected latents of an FP8 cache: decoding, any number of heads.

o[t, h] = softmax_j(scale * q[t, h] . k[j]) k[j, :512] over the keys j of query t; q and k of 576 or 512 channels

Plan
- Keys are the rows of both products, S^T = K Q^T and O^T += V^T P^T: operands in registers, never stored as bf16.
- A CTA has `rows` heads of a query, 16, 32 or 64, and its keys in tiles of 64, query after query or in shares, whose
  partial results sparse_mla_combine_sm90.py combines. The fourth warpgroup loads (byte_tiles.py): rows, then keys.
- One warpgroup scores: S^T of 64 keys by wgmma, Q in shared memory; softmax; P^T in bf16 to shared memory. Two
  accumulate: each has 256 channels x `rows` of O^T. All three read the bytes.
- A lane reads 16 channels of a key at once. Which channels the products' 16 of a step are is free, if Q is in the same
  order: it is stored so. Which channels are the rows of O^T is free, too: a lane has twice 4 neighbours of a head.
- The maximum that P is relative to may lag behind the true one by a factor of 2^8: a barrier asks all lanes whether it
  does more; only then is the maximum of the columns, which lie in all warps, found.
Shared memory: Q, two P^T, SLOTS tiles of bytes. Registers: REGISTERS, 512 a lane together. Launch: programmatic.
Roofline: of a tile of 64 heads wgmma takes 2176 clocks; shared memory delivers 82 KiB of bytes, 72 of Q, 64 of P^T and
takes in 41 and 8: 2140 clocks. Memory delivers a tile to all multiprocessors at once in 2300. Measured 4480: a scoring
warp has 1180 instructions a tile one after the other, most of them from bytes to bf16, an accumulating one 670.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.byte_tiles import V4_BYTES, V32_BYTES, ByteRings, ByteTiles
from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.fp8_rows import four_numbers, interleave, two_keys, ue8m0_scale
from dsa.cute.gathered_tiles import Selection, Share
from dsa.cute.group_vote import any_of_group
from dsa.cute.latent_attention import LAG, LN2, NOTHING, P_SLOTS, THREADS, WARPGROUP, Piece, Results
from dsa.cute.latent_tiles import CHUNK, FACTS, FIRST_TILE, LATENT, LENGTH, PART, SEEN, SEQUENCE, TILE, TILES, VALUE
from dsa.cute.matrix_store import pack, store_matrices
from dsa.cute.register_pressure import computed_here
from dsa.cute.ring import advance
from dsa.cute.shared_bytes import load_4, load_8, load_16, load_byte, load_float, store_4

# Of the scoring, the accumulating and the loading warpgroup, by the heads of a CTA.
REGISTERS = {16: (152, 128, 56), 32: (152, 128, 56), 64: (136, 176, 24)}
SLOTS = 3
HALF = VALUE // 2
BLOCKS = VALUE // CHUNK  # of 64 channels, that are values
K16 = 16
SCORE_BARRIER, VOTE_BARRIER = 1, 2
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Exchange:
    """What the scoring and the accumulating warpgroups tell each other. Pointers are to barriers.

    p         P^T [heads, 64 keys, P_SLOTS]; p_full, p_empty: of each slot
    factors   [heads, P_SLOTS]: what the columns of O^T are to be multiplied by before a tile, if changed [P_SLOTS] is
              not 0
    inverses  [heads]: what O^T is to be multiplied by at the end; end_full, end_empty
    columns   [heads, 4]: of the scoring warps: their columns' maxima, or sums; tops [heads], at the end
    """

    p: cute.Tensor
    p_full: cute.Pointer
    p_empty: cute.Pointer
    factors: cute.Tensor
    changed: cute.Tensor
    inverses: cute.Tensor
    end_full: cute.Pointer
    end_empty: cute.Pointer
    columns: cute.Tensor
    tops: cute.Tensor


@dataclass(frozen=True)
class ColumnState:
    """Of a lane's columns: the maximum that P is relative to, in powers of two (NOTHING while there is none), and the
    sum over the lane's keys."""

    top: cute.Tensor
    total: cute.Tensor


@cute.jit
def own_key(row):
    """Which key of eight is row `row` of the products: neighbours four apart, so that they lie in different banks."""
    return row // 2 + row % 2 * 4


class SparseMlaBytesSm90:
    """Keys of `channels` numbers, in `lists` lists; `rows` heads of a CTA."""

    def __init__(self, channels: int, rows: int, lists: int):
        self.channels, self.rows, self.lists = channels, rows, lists
        self.memory = ByteTiles(channels, rows, SLOTS)
        # Blocks of 64 channels of a key that are bytes; one more is bf16, and of 512 channels part of the value.
        self.byte_blocks = BLOCKS if channels > VALUE else BLOCKS - 1
        self.own = rows // 4  # columns of a lane

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        cache: cute.Tensor,
        indices: cute.Tensor,
        counts: cute.Tensor,
        has_counts: Int32,
        more_cache: cute.Tensor,
        more_indices: cute.Tensor,
        more_counts: cute.Tensor,
        more_has_counts: Int32,
        sink: cute.Tensor,
        has_sink: Int32,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_parts: cute.Tensor,
        lse_parts: cute.Tensor,
        scale: Float32,
        group: Int32,
        parts: Int32,
        rounds: Int32,
        cut: Int32,
        stream,
    ):
        k_major, mn_major = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN
        registers = cute.nvgpu.warpgroup.OperandSource.RMEM
        make, one, shape = sm90.make_trivial_tiled_mma, (1, 1, 1), (TILE, self.rows)
        score = make(BFloat16, BFloat16, k_major, k_major, Float32, one, shape, registers)
        value = make(BFloat16, BFloat16, k_major, mn_major, Float32, one, shape, registers)
        q_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (TILE, self.rows, self.channels), BFloat16, 1)
        p_layout = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (TILE, self.rows, TILE), BFloat16, P_SLOTS)

        @cute.struct
        class Storage:
            rings: self.memory.storage()
            p_full: cute.struct.MemRange[Int64, P_SLOTS]
            p_empty: cute.struct.MemRange[Int64, P_SLOTS]
            end_full: cute.struct.MemRange[Int64, 1]
            end_empty: cute.struct.MemRange[Int64, 1]
            changed: cute.struct.MemRange[Int32, P_SLOTS]
            factors: cute.struct.MemRange[Float32, self.rows * P_SLOTS]
            inverses: cute.struct.MemRange[Float32, self.rows]
            sink: cute.struct.MemRange[Float32, self.rows]
            columns: cute.struct.MemRange[Float32, 4 * self.rows]
            tops: cute.struct.MemRange[Float32, self.rows]
            p: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(p_layout)], 1024]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            raw: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, SLOTS * self.memory.slot_bytes], 128]

        assert Storage.size_in_bytes() <= 232448
        self.storage = Storage
        lists = []
        for keys, index, count, has in (
            (cache, indices, counts, has_counts),
            (more_cache, more_indices, more_counts, more_has_counts),
        ):
            lists.append(Selection(keys, index, count, has, cute.fast_divmod_create_divisor_v2(keys.shape[1])))
        row_tiles = (q.shape[2] + self.rows - 1) // self.rows
        self.kernel(
            *(q, lists[0], lists[1], Results(out, lse, out_parts, lse_parts), sink, has_sink),
            *(scale, group, parts, rounds, cut, row_tiles, score, value, q_layout, p_layout),
        ).launch(
            grid=(parts * row_tiles, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        keys: Selection,
        more_keys: Selection,
        results: Results,
        sink: cute.Tensor,
        has_sink: Int32,
        scale: Float32,
        group: Int32,
        parts: Int32,
        rounds: Int32,
        cut: Int32,
        row_tiles: Int32,
        score_mma: cute.TiledMma,
        value_mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        p_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        part, first_row = block // row_tiles, block % row_tiles * self.rows
        storage = SmemAllocator().allocate(self.storage)
        rings = self.memory.rings(storage.rings)
        exchange = Exchange(
            storage.p.get_tensor(p_layout.outer, swizzle=p_layout.inner),
            storage.p_full.data_ptr(),
            storage.p_empty.data_ptr(),
            storage.factors.get_tensor(cute.make_layout((self.rows, P_SLOTS))),
            storage.changed.get_tensor(cute.make_layout(P_SLOTS)),
            storage.inverses.get_tensor(cute.make_layout(self.rows)),
            storage.end_full.data_ptr(),
            storage.end_empty.data_ptr(),
            storage.columns.get_tensor(cute.make_layout((self.rows, 4))),
            storage.tops.get_tensor(cute.make_layout(self.rows)),
        )
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        raw = Int32(storage.raw.data_ptr().toint())
        if tid == 0:
            self.memory.init(rings)
            for i in cutlass.range_constexpr(P_SLOTS):
                cute.arch.mbarrier_init(exchange.p_full + i, 4)
                cute.arch.mbarrier_init(exchange.p_empty + i, 8)
            cute.arch.mbarrier_init(exchange.end_full, 4)
            cute.arch.mbarrier_init(exchange.end_empty, 8)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # What is behind this point touches global memory: the kernels before must be done with it.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        heads = q.shape[2]
        own_sink = storage.sink.get_tensor(cute.make_layout(self.rows))
        if tid < self.rows:
            own_sink[tid] = -Float32(float("inf"))
            if has_sink > 0 and first_row + tid < heads:
                own_sink[tid] = sink[first_row + tid] * LOG2E
        results = replace(results, sink=own_sink)
        score_registers, output_registers, loader_registers = REGISTERS[self.rows]
        if warp >= 12:
            cute.arch.setmaxregister_decrease(loader_registers)
            lists = [keys, more_keys][: self.lists]
            tiles = sum((selection.indices.shape[1] + TILE - 1) // TILE for selection in lists)
            share = Share(part, parts, rounds, q.shape[0], cutlass.max(tiles, 1), cut)
            self.memory.load(q, raw, rings, lists, group, share, first_row, warp - 12, lane)
        elif warp < 4:
            cute.arch.setmaxregister_increase(score_registers)
            self.score(q, results, score_mma, sq, raw, rings, exchange, first_row, group, scale, tid, warp, lane)
        else:
            cute.arch.setmaxregister_increase(output_registers)
            self.accumulate(
                *(results, value_mma, raw, rings, exchange, first_row, heads, group),
                *(tid % WARPGROUP, warp % 4, lane, warp // 4 - 1),
            )

    @cute.jit
    def take_queries(self, sq, raw, rings: ByteRings, ring, rows, tid):
        """A piece's queries from the slots in which they came to their own memory, zeros behind the last of `rows`; of
        each block of 64 channels in the order in which lanes have the keys'. -> the ring behind them."""
        slot, phase = ring
        row, m = tid // 8, tid % 8
        for i in cutlass.range_constexpr(self.memory.query_slots):
            cute.arch.mbarrier_wait(rings.full + slot, phase)
            for j in cutlass.range_constexpr(max(self.memory.query_rows // 16, 1)):
                source = raw + slot * self.memory.slot_bytes + (16 * j + row) * (2 * self.channels) + m * 16
                own = i * self.memory.query_rows + 16 * j + row
                target = Int32(sq.iterator.toint()) + 2 * CHUNK * own
                for block in cutlass.range_constexpr(self.channels // CHUNK):
                    words = load_16(source + 2 * CHUNK * block)
                    for pair in cutlass.range_constexpr(4):
                        vector, word = self.place_of(block, m, pair)
                        number = words[pair] if own < rows else Uint32(0)
                        place = target + 2 * CHUNK * self.rows * block + 16 * (vector ^ (own % 8)) + 4 * word
                        store_4(place, number)
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.empty + slot)
            slot, phase = advance(slot, phase, SLOTS)
        return slot, phase

    @cute.jit
    def place_of(self, block: cutlass.Constexpr, m, pair: cutlass.Constexpr):
        """Where channels 8 m + 2 pair and the next one of a block lie: (vector of 8, word in it). Step s of 16 channels
        has vectors 2 s and 2 s + 1; of a vector, lane t of a quad of lanes multiplies word t."""
        if const_expr(block < self.byte_blocks):
            # A lane reads channels 16 t to 16 t + 15: four of each of four steps.
            return 2 * (2 * (m % 2) + pair // 2) + pair % 2, m // 2
        # bf16: channels 8 t to 8 t + 7 of 32: four of each of two steps.
        return 4 * (m // 4) + pair, m % 4

    @cute.jit
    def score(
        self,
        q,
        results: Results,
        mma,
        sq,
        raw,
        rings: ByteRings,
        exchange: Exchange,
        first_row,
        group,
        scale,
        tid,
        warp,
        lane,
    ):
        """The scoring warpgroup: all pieces of this CTA."""
        thr = mma.get_slice(tid)
        rq = mma.make_fragment_B(thr.partition_B(sq))
        operands = cute.make_rmem_tensor((*thr.partition_shape_A((TILE, CHUNK)), 2), BFloat16)
        acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE, self.rows)), Float32)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(self.rows // 2))
        state = ColumnState(*[cute.make_rmem_tensor((self.own,), Float32) for _ in range(2)])
        slot, phase, place = Int32(0), Int32(0), (Int32(0), Int32(0))
        end_phase, at, facts_phase, sequence = Int32(0), Int32(0), Int32(0), Int32(0)
        while sequence >= 0:
            cute.arch.mbarrier_wait(rings.named + at, facts_phase)
            sequence = rings.facts[SEQUENCE, at]
            cute.arch.mbarrier_wait(rings.facts_full + at, facts_phase)
            piece = Piece(sequence, *[rings.facts[i, at] for i in (FIRST_TILE, TILES, PART, LENGTH, SEEN)])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.facts_empty + at)
            at, facts_phase = advance(at, facts_phase, FACTS)
            if sequence >= 0:
                # All have multiplied with the queries before.
                cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)
                slot, phase = self.take_queries(sq, raw, rings, (slot, phase), q.shape[2] - first_row, tid)
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)
                state.top.fill(NOTHING)
                state.total.fill(0.0)
                for _ in cutlass.range(piece.tiles, unroll=1):
                    cute.arch.mbarrier_wait(rings.full + slot, phase)
                    there = rings.present[warp, slot]
                    self.multiply(acc, mma, operands, rq, raw + slot * self.memory.slot_bytes, warp, lane)
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(rings.empty + slot)
                    cute.nvgpu.warpgroup.wait_group(0)
                    place = self.softmax(flat, state, exchange, there, scale, place, warp, lane)
                    slot, phase = advance(slot, phase, SLOTS)
                cute.arch.mbarrier_wait(exchange.end_empty, end_phase ^ 1)
                self.finish(results, exchange, state, piece, first_row, q.shape[2], group, tid, warp, lane)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(exchange.end_full)
                end_phase ^= 1

    @cute.jit
    def multiply(self, acc, mma, operands, rq, keys, warp, lane):
        """Start acc = K Q^T of the tile whose bytes are at `keys`; they have been read when this returns."""
        pitch = self.memory.pitch
        own = lane // 4
        first = keys + (warp * 16 + own_key(own)) * pitch
        words = cute.make_tensor(
            cute.recast_ptr(operands.iterator, dtype=Uint32), cute.make_layout((2, 2, CHUNK // K16, 2))
        )
        scales = []
        if const_expr(self.channels > VALUE):
            for r in cutlass.range_constexpr(2):
                scales.append([word.bitcast(Float32) for word in load_16(first + 8 * r * pitch + VALUE)])
        blocks = self.channels // CHUNK
        # A key's next block is on its way while the other key's is turned.
        read = [self.read_block(first, r, 0, lane) for r in range(2)]
        for b in cutlass.range_constexpr(blocks):
            if const_expr(b >= 2):
                cute.nvgpu.warpgroup.wait_group(1)
            for r in cutlass.range_constexpr(2):
                if const_expr(b < self.byte_blocks):
                    scale = Float32(1.0)
                    if const_expr(self.channels > VALUE):
                        scale = scales[r][b // 2]
                    else:
                        place = keys + self.memory.scales + (warp * 16 + 8 * r + own_key(own)) * 8 + b
                        scale = ue8m0_scale(load_byte(place))
                    for s, word in enumerate(read[r]):
                        words[r, 0, s, b % 2], words[r, 1, s, b % 2] = four_numbers(word, scale)
                else:
                    for i, word in enumerate(read[r]):
                        words[r, i % 2, i // 2, b % 2] = word
                if const_expr(b + 1 < blocks):
                    read[r] = self.read_block(first, r, b + 1, lane)
            cute.nvgpu.warpgroup.fence()
            for s in cutlass.range_constexpr(CHUNK // K16):
                mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, b + s > 0)
                cute.gemm(mma, acc, operands[None, None, s, b % 2], rq[None, None, b * (CHUNK // K16) + s, 0], acc)
            cute.nvgpu.warpgroup.commit_group()

    def read_block(self, first, r: int, block: int, lane) -> list:
        """What a lane has of a block of one of its two keys, as words: of bytes 16 channels, of bf16 twice 8."""
        row = first + 8 * r * self.memory.pitch + lane % 4 * 16
        if block < self.byte_blocks:
            return [*load_16(row + CHUNK * block)]
        start = row + self.memory.row_bytes - 2 * CHUNK
        return [*load_16(start), *load_16(start + 64)]

    @cute.jit
    def softmax(self, flat, state: ColumnState, exchange: Exchange, there, scale, place, warp, lane):
        """P^T of a tile's scores to shared memory, and what O^T must be multiplied by before. -> the next place.

        there: a bit for each of the warp's keys
        """
        top, total = state.top, state.total
        slot, phase = place
        if there != 0xFFFF:
            for r in cutlass.range_constexpr(2):
                if (there >> Uint32(8 * r + own_key(lane // 4))) & 1 == 0:
                    for i in cutlass.range_constexpr(self.own):
                        flat[i // 2 * 4 + 2 * r + i % 2] = -Float32(float("inf"))
        most = -Float32(float("inf"))
        for i in cutlass.range_constexpr(self.rows // 2):
            most = cute.arch.fmax(most, cute.math.fma(flat[i], scale, -top[i // 4 * 2 + i % 2]))
        cute.arch.mbarrier_wait(exchange.p_empty + slot, phase ^ 1)
        rises = any_of_group(most > LAG, VOTE_BARRIER, WARPGROUP)
        if rises:
            self.raise_tops(flat, state, exchange, scale, slot, warp, lane)
        if warp == 0:
            with cute.arch.elect_one():
                exchange.changed[slot] = Int32(1) if rises else Int32(0)
        start = Int32(exchange.p.iterator.toint()) + slot * (2 * TILE * self.rows)
        # Lane 8 i + r gives the address of row r of matrix i: two of keys, then two of heads.
        key = warp * 16 + lane // 8 % 2 * 8 + own_key(lane % 8)
        for j in cutlass.range_constexpr(self.rows // 16):
            powers = []
            for i in cutlass.range_constexpr(8):
                column = 4 * j + i // 4 * 2 + i % 2
                power = cute.math.exp2(cute.math.fma(flat[8 * j + i], scale, -top[column]), fastmath=True)
                total[column] += power
                powers.append(power)
            words = [pack(powers[2 * i], powers[2 * i + 1], BFloat16) for i in range(4)]
            offset = key * (2 * self.rows) + (2 * j + lane // 16) * 16
            store_matrices(start + (offset ^ ((offset >> 3) & (2 * self.rows - 16))), words)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(exchange.p_full + slot)
        return advance(slot, phase, P_SLOTS)

    @cute.jit
    def raise_tops(self, flat, state: ColumnState, exchange: Exchange, scale, slot, warp, lane):
        """The true maxima of the columns where they exceed the tops by too much, and the factors that follow."""
        top, total = state.top, state.total
        for c in cutlass.range_constexpr(self.own):
            value = cute.arch.fmax(flat[c // 2 * 4 + c % 2], flat[c // 2 * 4 + 2 + c % 2])
            for log in cutlass.range_constexpr(2, 5):
                value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1 << log))
            if lane // 4 == 0:
                exchange.columns[c // 2 * 8 + lane % 4 * 2 + c % 2, warp] = value
        cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)
        for c in cutlass.range_constexpr(self.own):
            column = c // 2 * 8 + lane % 4 * 2 + c % 2
            highest = exchange.columns[column, 0]
            for w in cutlass.range_constexpr(1, 4):
                highest = cute.arch.fmax(highest, exchange.columns[column, w])
            highest *= scale
            factor = Float32(1.0)
            if highest > top[c] + LAG:
                factor = cute.math.exp2(top[c] - highest, fastmath=True)
                top[c] = highest
                total[c] *= factor
            if warp == 0 and lane // 4 == 0:
                exchange.factors[column, slot] = factor
        # The columns may be written again.
        cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)

    @cute.jit
    def finish(
        self,
        results: Results,
        exchange: Exchange,
        state: ColumnState,
        piece: Piece,
        first_row,
        heads,
        group,
        tid,
        warp,
        lane,
    ):
        """LSE of the piece's rows, and what O^T is to be multiplied by."""
        for c in cutlass.range_constexpr(self.own):
            amount = state.total[c]
            for log in cutlass.range_constexpr(2, 5):
                amount += cute.arch.shuffle_sync_bfly(amount, offset=1 << log)
            column = c // 2 * 8 + lane % 4 * 2 + c % 2
            if lane // 4 == 0:
                exchange.columns[column, warp] = amount
                if warp == 0:
                    exchange.tops[column] = state.top[c]
        cute.arch.barrier(barrier_id=SCORE_BARRIER, number_of_threads=WARPGROUP)
        if tid < self.rows:
            amount = exchange.columns[tid, 0] + exchange.columns[tid, 1]
            amount += exchange.columns[tid, 2] + exchange.columns[tid, 3]
            inverse, result = Float32(0.0), Float32(float("inf"))
            if piece.part >= 0:
                result = -Float32(float("inf"))
            if amount != 0.0:
                whole, top = amount, exchange.tops[tid]
                if piece.part < 0:
                    whole += cute.math.exp2(results.sink[tid] - top)
                inverse = 1.0 / whole
                result = top * LN2 + cute.math.log(amount)
            exchange.inverses[tid] = inverse
            row = first_row + tid
            if row < heads:
                if piece.part >= 0:
                    results.lse_parts[piece.part, 0, row] = result
                else:
                    results.lse[piece.sequence // group, row, piece.sequence % group] = result
        cute.arch.sync_warp()

    @cute.jit
    def accumulate(
        self,
        results: Results,
        mma,
        raw,
        rings: ByteRings,
        exchange: Exchange,
        first_row,
        heads,
        group,
        tid,
        warp,
        lane,
        side,
    ):
        """An accumulating warpgroup, number `side`: its half of the channels, all pieces of this CTA.

        Of a warp's 64 channels lane l has four, from 4 (l / 4) on, and those 32 further: rows l / 4 and 8 further of
        the four products are the first two of these, the next two, and so on.
        """
        thr = mma.get_slice(tid)
        rp = mma.make_fragment_B(thr.partition_B(exchange.p))
        # Of 16 keys, two products; twice.
        operands = cute.make_rmem_tensor((*thr.partition_shape_A((TILE, K16)), 2, 2), BFloat16)
        flat = cute.make_rmem_tensor((2 * self.rows,), Float32)
        of_product = cute.make_layout(thr.partition_shape_C((TILE, self.rows)))
        accs = [cute.make_tensor(flat.iterator + j * (self.rows // 2), of_product) for j in range(4)]
        slot, phase, place, p_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        end_phase, at, facts_phase, sequence = Int32(0), Int32(0), Int32(0), Int32(0)
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        while sequence >= 0:
            cute.arch.mbarrier_wait(rings.facts_full + at, facts_phase)
            sequence, tiles, part = rings.facts[SEQUENCE, at], rings.facts[TILES, at], rings.facts[PART, at]
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.facts_empty + at)
            at, facts_phase = advance(at, facts_phase, FACTS)
            if sequence >= 0:
                flat.fill(0.0)
                for _ in cutlass.range_constexpr(self.memory.query_slots):
                    # The queries, which are not for this warpgroup; but a wait must not leave out a phase.
                    cute.arch.mbarrier_wait(rings.full + slot, phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(rings.empty + slot)
                    slot, phase = advance(slot, phase, SLOTS)
                for _ in cutlass.range(tiles, unroll=1):
                    cute.arch.mbarrier_wait(rings.full + slot, phase)
                    cute.arch.mbarrier_wait(exchange.p_full + place, p_phase)
                    if exchange.changed[place] != 0:
                        for c in cutlass.range_constexpr(self.own):
                            factor = exchange.factors[c // 2 * 8 + lane % 4 * 2 + c % 2, place]
                            for j in cutlass.range_constexpr(8):
                                flat[j // 2 * (self.rows // 2) + c // 2 * 4 + j % 2 * 2 + c % 2] *= factor
                    self.add(accs, mma, operands, rp, raw + slot * self.memory.slot_bytes, place, warp, lane, side)
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(rings.empty + slot)
                    cute.nvgpu.warpgroup.wait_group(0)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(exchange.p_empty + place)
                    slot, phase = advance(slot, phase, SLOTS)
                    place, p_phase = advance(place, p_phase, P_SLOTS)
                cute.arch.mbarrier_wait(exchange.end_full, end_phase)
                channel = side * HALF + warp * CHUNK + lane // 4 * 4
                for c in cutlass.range_constexpr(self.own):
                    column = c // 2 * 8 + lane % 4 * 2 + c % 2
                    inverse = exchange.inverses[column]
                    numbers = []
                    for j in cutlass.range_constexpr(8):
                        at_ = j // 2 * (self.rows // 2) + c // 2 * 4 + j % 2 * 2 + c % 2
                        numbers.append(flat[at_] * inverse)
                    row = computed_here(first_row + column)
                    if row < heads:
                        if part >= 0:
                            target = results.out_parts[part, 0, row, None]
                            vector = cute.make_rmem_tensor((4,), Float32)
                            for half in cutlass.range_constexpr(2):
                                for j in cutlass.range_constexpr(4):
                                    vector[j] = numbers[4 * half + j]
                                cute.autovec_copy(vector, cute.local_tile(target, (4,), (channel // 4 + 8 * half,)))
                        else:
                            target = results.out[sequence // group, sequence % group, row, None]
                            words = cute.make_rmem_tensor((2,), Uint32)
                            for half in cutlass.range_constexpr(2):
                                for j in cutlass.range_constexpr(2):
                                    first = 4 * half + 2 * j
                                    words[j] = pack(numbers[first], numbers[first + 1], BFloat16)
                                part_ = cute.local_tile(target, (4,), (channel // 4 + 8 * half,))
                                cute.autovec_copy(cute.recast_tensor(words, BFloat16), part_)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(exchange.end_empty)
                end_phase ^= 1

    @cute.jit
    def add(self, accs, mma, operands, rp, keys, place, warp, lane, side):
        """Start O^T += V^T P^T of the tile whose bytes are at `keys`; they have been read when this returns."""
        pitch, registers = self.memory.pitch, cute.make_layout((2, 2, 2, 2))
        # [channel of two, keys of two halves, product of two, which of the two operands]
        words = cute.make_tensor(cute.recast_ptr(operands.iterator, dtype=Uint32), registers)
        block = side * 4 + warp
        for s in cutlass.range_constexpr(TILE // K16):
            own = [16 * s + lane % 4 * 2 + i % 2 + i // 2 * 8 for i in range(4)]
            for half in cutlass.range_constexpr(2):
                # Channels 32 half + 4 (lane / 4) to + 3 of the block.
                first = keys + block * CHUNK + half * 32 + lane // 4 * 4
                if const_expr(s > 0):
                    cute.nvgpu.warpgroup.wait_group(1)
                if const_expr(self.channels > VALUE):
                    self.from_bytes(
                        words,
                        [load_4(first + key * pitch) for key in own],
                        [load_float(keys + key * pitch + VALUE + block // 2 * 4) for key in own],
                        half,
                    )
                elif block == BLOCKS - 1:
                    start = first + (half * 32 + lane // 4 * 4)
                    self.from_numbers(words, [load_8(start + key * pitch) for key in own], half)
                else:
                    self.from_bytes(
                        words,
                        [load_4(first + key * pitch) for key in own],
                        [ue8m0_scale(load_byte(keys + self.memory.scales + key * 8 + block)) for key in own],
                        half,
                    )
                self.start(accs, mma, operands, rp, place, s, half)

    @cute.jit
    def from_bytes(self, words, numbers, scales, half: cutlass.Constexpr):
        """Operands of two products of 16 keys; numbers: four channels of each of a lane's four keys."""
        for k in cutlass.range_constexpr(2):
            four = two_keys(numbers[2 * k], numbers[2 * k + 1], scales[2 * k], scales[2 * k + 1])
            for i in cutlass.range_constexpr(4):
                words[i % 2, k, i // 2, half] = four[i]

    @cute.jit
    def from_numbers(self, words, numbers, half: cutlass.Constexpr):
        """The same, of channels in bf16."""
        for k in cutlass.range_constexpr(2):
            for j in cutlass.range_constexpr(2):
                words[0, k, j, half], words[1, k, j, half] = interleave(numbers[2 * k][j], numbers[2 * k + 1][j])

    @cute.jit
    def start(self, accs, mma, operands, rp, place, s: cutlass.Constexpr, half: cutlass.Constexpr):
        """Two of the four products, of 16 keys."""
        cute.nvgpu.warpgroup.fence()
        for j in cutlass.range_constexpr(2):
            acc = accs[2 * half + j]
            cute.gemm(mma, acc, operands[None, None, 0, j, half], rp[None, None, s, place], acc)
        cute.nvgpu.warpgroup.commit_group()


@cached
def compile_sparse_mla_bytes(channels: int, rows: int, lists: int):
    """-> f(q [T, 1, h, d], cache [pages, P, 656 | 584], indices [T, K], counts [n], has_counts, the same of the second
    list, sink [m], has_sink, out [T / s_q, s_q, h, 512], lse [T / s_q, h, s_q], out_parts [slots, 1, h, 512], lse_parts
    [slots, 1, h], scale * log2(e), s_q, parts, rounds, cut), as `compile_sparse_mla` of bf16; pages contiguous."""

    def fake(dtype, shape, stride, align):
        return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)

    def strides(count, divisibility):
        return tuple(cute.sym_int64(divisibility=divisibility) for _ in range(count))

    queries, batch, group, heads, slots = (cute.sym_int() for _ in range(5))

    def selection():
        width = V32_BYTES if channels == LATENT else V4_BYTES
        return (
            fake(cutlass.Uint8, (cute.sym_int(), cute.sym_int(), width), (*strides(1, 16), width, 1), 16),
            fake(Int32, (queries, cute.sym_int()), (*strides(1, 1), 1), 4),
            fake(Int32, (cute.sym_int(),), (1,), 4),
            Int32(0),
        )

    return compile_sm90(
        SparseMlaBytesSm90(channels, rows, lists),
        fake(BFloat16, (queries, 1, heads, channels), (*strides(3, 8), 1), 16),
        *selection(),
        *selection(),
        fake(Float32, (cute.sym_int(),), (1,), 4),
        Int32(0),
        fake(BFloat16, (batch, group, heads, VALUE), (*strides(2, 8), VALUE, 1), 16),
        fake(Float32, (batch, heads, group), (*strides(2, 1), 1), 4),
        fake(Float32, (slots, 1, heads, VALUE), (*strides(2, 4), VALUE, 1), 16),
        fake(Float32, (slots, 1, heads), (*strides(2, 1), 1), 4),
        *(Float32(0.0), Int32(0), Int32(0), Int32(0), Int32(0)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_sparse_mla_bytes, (channels, rows, lists))
        for channels in (LATENT, VALUE)
        for rows in (16, 32, 64)
        for lists in (1, 2)
    ]
