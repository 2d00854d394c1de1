"""Attention of few heads over latents in 16 bits: keys are the rows of both products, as they lie in shared memory, and
heads their columns: S^T = K Q^T, O^T += V^T P^T. So the products cost no more than the heads there are.

Two warpgroups score, tiles of 64 keys in turns; two accumulate 256 channels x `rows` of O^T each. A lane has channels
lane / 4 and 8 further of a warp's 16 of each 64; the result goes through shared memory, which turns it.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.shared_memory import pack, store_transposed
from dsa.cute.sm90 import opaque
from dsa.kernels.mla.mla_attention import Piece, Results
from dsa.kernels.mla.mla_tiles import (
    CHUNK,
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
    LatentRings,
    chunk_order,
)
from dsa.kernels.mla.swap_ab_exchange import Exchange, Thread, turn
from dsa.kernels.mla.swap_ab_softmax import ColumnSoftmax
from dsa.kernels.mla.topk_gather import GatheredTiles, TileMemory

K16 = 16
SCORERS = 2


@dataclass(frozen=True)
class RowRange:
    """Heads first to first + rows - 1 of `heads`."""

    first: Int32
    heads: Int32


class ColumnAttention(ColumnSoftmax):
    """Keys of `channels` numbers in `memory`, `rows` heads, 16 or 32; `highest`: max_logits, too."""

    def __init__(self, memory: GatheredTiles, channels: int, rows: int, highest: bool):
        super().__init__(rows, SCORERS, memory.dtype, powers=False, highest=highest)
        self.memory, self.dtype, self.order = memory, memory.dtype, chunk_order(channels)

    def multiplications(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """Scores and O^T += V^T P^T."""
        k_major, mn_major = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN
        make, one, shape = sm90.make_trivial_tiled_mma, (1, 1, 1), (TILE, self.rows)
        return (
            make(self.dtype, self.dtype, k_major, k_major, Float32, one, shape),
            make(self.dtype, self.dtype, mn_major, mn_major, Float32, one, shape),
        )

    @cute.jit
    def score(
        self,
        results: Results,
        mma,
        tiles: TileMemory,
        rings: LatentRings,
        exchange: Exchange,
        rows: RowRange,
        group,
        scale,
        thread: Thread,
    ):
        """A scoring warpgroup: all pieces of this CTA."""
        thr = mma.get_slice(thread.tid)
        keys = [mma.make_fragment_A(thr.partition_A(slots)) for slots in (tiles.units, tiles.ropes)]
        queries = mma.make_fragment_B(thr.partition_B(exchange.queries))
        acc = cute.make_rmem_tensor(thr.partition_shape_C((TILE, self.rows)), Float32)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(self.rows // 2))
        peaks = cute.make_rmem_tensor((self.own,), Float32)
        ring, pieces, parts, sequence = Int32(0), Int32(0), Int32(0), Int32(0)
        while sequence >= 0:
            at, facts_phase = turn(pieces)
            cute.arch.mbarrier_wait(rings.named + at, facts_phase)
            sequence = rings.facts[SEQUENCE, at]
            cute.arch.mbarrier_wait(rings.facts_full + at, facts_phase)
            piece = Piece(sequence, *[rings.facts[i, at] for i in (FIRST_TILE, TILES, PART, LENGTH, SEEN)])
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.facts_empty + at)
            if sequence >= 0:
                # All have multiplied with the queries before.
                self.meet_all()
                self.take_queries(tiles, rings, exchange, ring, thread)
                ring += 1
                self.begin(exchange, thread)
                peaks.fill(-float("inf"))
                cute.arch.fence_proxy("async.shared", space="cta")
                self.meet_all()
                first = (parts ^ thread.side) & (self.scorers - 1)
                for tile in cutlass.range(first, piece.tiles, self.scorers, unroll=1):
                    self.multiply(acc, mma, keys, queries, rings, ring + tile)
                    place, p_phase = turn(parts + tile)
                    cute.arch.mbarrier_wait(exchange.p_empty + place, p_phase ^ 1)
                    cute.nvgpu.warpgroup.wait_group(0)
                    rope, _ = self.position(ring + tile, self.memory.ropes)
                    there = rings.present[thread.warp, rope]
                    self.softmax(flat, exchange, there, None, None, peaks, scale, place, p_phase, thread)
                    self.memory.release(rings.rope_empty + rope)
                ring, parts = ring + piece.tiles, parts + piece.tiles
                self.finish(results, exchange, piece, (rows.first, rows.heads), group, parts, pieces, peaks, thread)
                pieces += 1

    @cute.jit
    def position(self, count, slots: cutlass.Constexpr):
        """(slot, phase) of a ring of so many, after `count`."""
        return count % slots, count // slots & 1

    @cute.jit
    def take_queries(self, tiles: TileMemory, rings: LatentRings, exchange: Exchange, ring, thread: Thread):
        """They came as keys do, as tile number `ring`, row by row: chunks of 64 channels to their memory as is."""
        rope, rope_phase = self.position(ring, self.memory.ropes)
        vector = cute.make_rmem_tensor((8,), self.dtype)
        target = cute.recast_ptr(exchange.queries.iterator, cute.make_swizzle(0, 4, 3), dtype=self.dtype)
        for n, chunk in enumerate(self.order):
            slots, place = tiles.ropes, rope
            if const_expr(chunk < VALUE // CHUNK):
                unit, unit_phase = self.position(ring * TILE_UNITS + self.unit_of(n), self.memory.units)
                slots, place = tiles.units, unit * UNIT_CHUNKS + chunk % UNIT_CHUNKS
                cute.arch.mbarrier_wait(rings.unit_full + place, unit_phase)
            else:
                cute.arch.mbarrier_wait(rings.rope_full + rope, rope_phase)
            source = cute.recast_ptr(slots.iterator, cute.make_swizzle(0, 4, 3), dtype=self.dtype)
            source += place * (TILE * CHUNK)
            # Rows of 128 bytes: a vector for each of 16 or 32 rows x 8.
            here = self.number(thread) * 8
            if here < self.rows * CHUNK:
                cute.autovec_copy(cute.make_tensor(source + here, cute.make_layout(8)), vector)
                there = cute.make_tensor(target + (chunk * self.rows * CHUNK + here), cute.make_layout(8))
                cute.autovec_copy(vector, there)
        self.meet_all()
        if thread.side == 0:
            for n in cutlass.range_constexpr(TILE_UNITS):
                unit, _ = self.position(ring * TILE_UNITS + n, self.memory.units)
                self.memory.release(rings.unit_empty + unit)
            self.memory.release(rings.rope_empty + rope)

    def unit_of(self, n: int) -> int:
        """Of the chunk that comes as number n the unit, in the order in which they come."""
        return sum(chunk < VALUE // CHUNK for chunk in self.order[:n]) // UNIT_CHUNKS

    @cute.jit
    def multiply(self, acc, mma, keys, queries, rings: LatentRings, ring):
        """Start acc = K Q^T of tile number `ring`, as its parts arrive."""
        of_units, of_ropes = keys
        rope, rope_phase = self.position(ring, self.memory.ropes)
        cute.nvgpu.warpgroup.fence()
        for n, chunk in enumerate(self.order):
            unit, unit_phase = self.position(ring * TILE_UNITS + self.unit_of(n), self.memory.units)
            if const_expr(n == ROPE_AFTER * UNIT_CHUNKS):
                cute.arch.mbarrier_wait(rings.rope_full + rope, rope_phase)
            if const_expr(chunk < VALUE // CHUNK):
                cute.arch.mbarrier_wait(rings.unit_full + (unit * UNIT_CHUNKS + chunk % UNIT_CHUNKS), unit_phase)
            own_unit, own_rope = opaque(unit), opaque(rope)
            for step in cutlass.range_constexpr(CHUNK // K16):
                a = of_ropes[None, None, step, own_rope]
                if const_expr(chunk < VALUE // CHUNK):
                    a = of_units[None, None, chunk % UNIT_CHUNKS * (CHUNK // K16) + step, own_unit]
                mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, n + step > 0)
                cute.gemm(mma, acc, a, queries[None, None, chunk * (CHUNK // K16) + step, 0], acc)
        cute.nvgpu.warpgroup.commit_group()

    @cute.jit
    def accumulate(
        self,
        results: Results,
        mma,
        tiles: TileMemory,
        rings: LatentRings,
        exchange: Exchange,
        staging: cute.Pointer,
        rows: RowRange,
        group,
        thread: Thread,
    ):
        """An accumulating warpgroup: its half of the channels, all pieces of this CTA."""
        thr = mma.get_slice(thread.tid)
        values = cute.make_tensor(tiles.units.iterator, cute.select(tiles.units.layout, mode=[1, 0, 2]))
        rv = mma.make_fragment_A(thr.partition_A(values))
        rp = mma.make_fragment_B(thr.partition_B(exchange.p))
        flat = cute.make_rmem_tensor((2 * self.rows,), Float32)
        of_unit = cute.make_layout(thr.partition_shape_C((UNIT, self.rows)))
        accs = [cute.make_tensor(flat.iterator + half * self.rows, of_unit) for half in range(2)]
        unit, pieces, parts, sequence = thread.side, Int32(0), Int32(0), Int32(0)
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        while sequence >= 0:
            at, facts_phase = turn(pieces)
            cute.arch.mbarrier_wait(rings.facts_full + at, facts_phase)
            sequence, count, part = rings.facts[SEQUENCE, at], rings.facts[TILES, at], rings.facts[PART, at]
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(rings.facts_empty + at)
            if sequence >= 0:
                flat.fill(0.0)
                unit = self.behind(unit, TILE_UNITS)  # the queries
                for _ in cutlass.range(count, unroll=1):
                    place, p_phase = turn(parts)
                    cute.arch.mbarrier_wait(exchange.p_full + place, p_phase)
                    if exchange.changed[place] != 0:
                        for c in cutlass.range_constexpr(self.own):
                            factor = exchange.factors[c // 2 * 8 + (thread.lane & 3) * 2 + c % 2, place]
                            for j in cutlass.range_constexpr(8):
                                flat[self.element(c, j)] *= factor
                    cute.nvgpu.warpgroup.fence()
                    second = self.behind(unit, 2)
                    for half, slot in enumerate((unit, second)):
                        own = opaque(slot)
                        for step in cutlass.range_constexpr(TILE // K16):
                            a, b = rv[None, None, step, own], rp[None, None, step, place]
                            cute.gemm(mma, accs[half], a, b, accs[half])
                        cute.nvgpu.warpgroup.commit_group()
                    cute.nvgpu.warpgroup.wait_group(1)
                    self.memory.release(rings.unit_empty + unit)
                    cute.nvgpu.warpgroup.wait_group(0)
                    self.memory.release(rings.unit_empty + second)
                    unit = self.behind(second, 2)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(exchange.p_empty + place)
                    parts += 1
                cute.arch.mbarrier_wait(exchange.end_full, pieces & 1)
                for c in cutlass.range_constexpr(self.own):
                    inverse = exchange.inverses[c // 2 * 8 + (thread.lane & 3) * 2 + c % 2]
                    for j in cutlass.range_constexpr(8):
                        flat[self.element(c, j)] *= inverse
                if part >= 0:
                    self.store_partial(flat, results.out_parts, part, rows, thread)
                else:
                    whose, query = divmod(sequence, group)
                    self.store(flat, results.out, (whose, query), rows, staging, thread)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(exchange.end_empty)
                pieces += 1

    def element(self, column: int, j: int) -> int:
        """Where a lane has the j-th of its eight channels of a column: of two units of two products of 64 channels."""
        return j // 2 * (self.rows // 2) + column // 2 * 4 + j % 2 * 2 + column % 2

    @cute.jit
    def behind(self, unit, count: cutlass.Constexpr):
        """So many slots of the ring further."""
        return unit + count - self.memory.units if unit >= self.memory.units - count else unit + count

    @cute.jit
    def store_partial(self, flat, out_parts, part, rows: RowRange, thread: Thread):
        lane = opaque(thread.lane)
        for c in cutlass.range_constexpr(self.own):
            row = rows.first + (c // 2 * 8 + (lane & 3) * 2 + c % 2)
            if row < rows.heads:
                target = out_parts[part, 0, row, None]
                for j in cutlass.range_constexpr(8):
                    channel = thread.side * (VALUE // 2) + j // 2 * CHUNK + thread.warp * 16 + j % 2 * 8 + (lane >> 2)
                    target[channel] = flat[self.element(c, j)]

    @cute.jit
    def store(self, flat, out, place, rows: RowRange, staging: cute.Pointer, thread: Thread):
        """By way of `rows` x 16 numbers of a warp's own shared memory."""
        whose, query = place
        lane, warp = opaque(thread.lane), thread.side * 4 + thread.warp
        own = staging + warp * (self.rows * 16)
        vector = cute.make_rmem_tensor((8,), self.dtype)
        for product in cutlass.range_constexpr(4):
            for n in cutlass.range_constexpr(self.rows // 16):
                # Matrices of 8 channels x 8 heads: two of channels, then two of heads.
                words = []
                for i in cutlass.range_constexpr(4):
                    column, j = 4 * n + i // 2 * 2, 2 * product + i % 2
                    words.append(pack(flat[self.element(column, j)], flat[self.element(column + 1, j)], self.dtype))
                head = 16 * n + (lane >> 4) * 8 + (lane & 7)
                store_transposed(Int32((own + (head * 16 + (lane & 8))).toint()), words)
            cute.arch.sync_warp()
            channel = thread.side * (VALUE // 2) + product * CHUNK + thread.warp * 16 + (lane & 1) * 8
            for n in cutlass.range_constexpr(self.rows // 16):
                head = 16 * n + (lane >> 1)
                cute.autovec_copy(cute.make_tensor(own + (head * 16 + (lane & 1) * 8), cute.make_layout(8)), vector)
                if rows.first + head < rows.heads:
                    target = out[whose, query, rows.first + head, None]
                    cute.autovec_copy(vector, cute.local_tile(target, (8,), (channel // 8,)))
            cute.arch.sync_warp()
