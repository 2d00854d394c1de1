"""Sparse MLA attention over selected latents, for prefill and decoding: every query has its own list of keys, or two.

o[t, h] = softmax_j(scale * q[t, h] . k[j]) k[j, :512] over the keys j of query t; q and k of 576 or 512 channels

Plan
- A CTA has 64 heads of a query and runs through the tiles of 64 of its keys (latent_attention.py), query after query.
- The fourth warpgroup gathers: 16 bytes a lane by cp.async, a tile's indices while the tile before is asked for. Where
  there is no key it writes zeros, and says so by a bit; such a score is minus infinity.
- A query's own rows come by the same rings, as a tile before its keys: loads do not wait for the end of a query.
- CTAs take whole queries in turns. What is too little for another turn is cut into even shares, and partial results,
  at most two a CTA, are combined (sparse_mla_combine_sm90.py).
- The CTAs of a query's other heads are neighbours, and read the same keys from the L2 cache.
Shared memory: FREE chunks of Q, two P, a ring of units of 16 KiB and one of rope parts: two and a half tiles.
Launch: programmatic.
Roofline: of a tile of 576 channels wgmma takes 2176 clocks, of 512 2048. The L2 cache delivers a tile, 72 KiB to every
multiprocessor, in about 1700 to 3000 clocks, depending on how much of it comes from memory.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.pipeline import advance
from dsa.cute.shared_memory import load_matrices, swizzled
from dsa.kernels.mla.mla_attention import (
    LOADER_REGISTERS,
    OUTPUT_REGISTERS,
    SCORE_REGISTERS,
    THREADS,
    WARPGROUP,
    LatentAttention,
    Piece,
    Results,
    RowTile,
    SoftmaxState,
)
from dsa.kernels.mla.mla_queries import ROWS
from dsa.kernels.mla.mla_tiles import CHUNK, LATENT, TILE, UNIT_CHUNKS, VALUE, LatentRings
from dsa.kernels.mla.sparse_arguments import fake_lists, fake_results, fake_sink, selections
from dsa.kernels.mla.topk_gather import GatheredTiles, Selection, Share, TileMemory

HELD = 5  # chunks of Q in registers
ROPES = 2
LOG2E = 1.4426950408889634
UNITS = {LATENT: 10, VALUE: 11}


class SparseMlaSm90(LatentAttention):
    """Keys of `channels` numbers; `highest`: max_logits are wanted."""

    queries_in_ring = True

    def __init__(self, dtype: type[cutlass.Numeric], channels: int, highest: bool):
        super().__init__(GatheredTiles(dtype, channels, UNITS[channels], ROPES), channels, HELD, highest)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        caches: list[cute.Tensor],
        indices: list[cute.Tensor],
        counts: list[cute.Tensor],
        counted: Int32,
        sink: cute.Tensor,
        has_sink: Int32,
        out: cute.Tensor,
        lse: cute.Tensor,
        out_parts: cute.Tensor,
        lse_parts: cute.Tensor,
        max_logits: cute.Tensor | None,
        scale: Float32,
        group: Int32,
        parts: Int32,
        rounds: Int32,
        cut: Int32,
        stream,
    ):
        score, score_held, value = self.multiplications()
        q_layout, unit_layout, rope_layout = self.q_layout(), self.memory.unit_layout(), self.memory.rope_layout()

        @cute.struct
        class Storage:
            rings: self.memory.storage()
            sink: cute.struct.MemRange[Float32, ROWS]
            exchange: self.exchange_storage()
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            units: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(unit_layout)], 1024]
            # Keys of 512 channels have no part of their own for rope.
            ropes: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(rope_layout) if self.memory.rope else 8], 1024
            ]

        assert Storage.size_in_bytes() <= 232448
        self.storage = Storage
        lists = selections(caches, indices, counts, counted)
        row_tiles = (q.shape[2] + ROWS - 1) // ROWS
        results = Results(out, lse, out_parts, lse_parts, max_logits)
        self.kernel(
            *(q, lists, results, sink, has_sink, scale, cute.fast_divmod_create_divisor_v2(group)),
            *(parts, rounds, cut, row_tiles),
            *(score, score_held, value, q_layout, unit_layout, rope_layout),
        ).launch(
            grid=(parts * row_tiles, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        lists: list[Selection],
        results: Results,
        sink: cute.Tensor,
        has_sink: Int32,
        scale: Float32,
        group: cute.FastDivmodDivisorV2,
        parts: Int32,
        rounds: Int32,
        cut: Int32,
        row_tiles: Int32,
        score_mma: cute.TiledMma,
        held_mma: cute.TiledMma,
        value_mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        unit_layout: cute.ComposedLayout,
        rope_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        part, row_tile = block // row_tiles, block % row_tiles
        storage = SmemAllocator().allocate(self.storage)
        rings, exchange = self.memory.rings(storage.rings), self.exchange(storage.exchange)
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        units = storage.units.get_tensor(unit_layout.outer, swizzle=unit_layout.inner)
        ropes = storage.ropes.get_tensor(rope_layout.outer, swizzle=rope_layout.inner)
        if tid == 0:
            self.memory.init_gathered(rings)
            exchange.init()
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # What is behind this point touches global memory: the kernels before must be done with it.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        heads = q.shape[2]
        own_sink = storage.sink.get_tensor(cute.make_layout(ROWS))
        if tid < ROWS:
            own_sink[tid] = -Float32(float("inf"))
            if has_sink > 0 and row_tile * ROWS + tid < heads:
                own_sink[tid] = sink[row_tile * ROWS + tid] * LOG2E
        results = replace(results, sink=own_sink)
        tile = RowTile(group, heads, heads, row_tile * ROWS, Int32(0), Int32(0))
        if warp >= 12:
            cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            tiles = sum((selection.indices.shape[1] + TILE - 1) // TILE for selection in lists)
            share = Share(part, parts, rounds, q.shape[0], cutlass.max(tiles, 1), cut)
            memory = TileMemory(units, ropes)
            self.memory.load(q, memory, rings, lists, group, share, tile.first, warp - 12, lane)
        elif warp < 4:
            cute.arch.setmaxregister_increase(SCORE_REGISTERS)
            self.score(
                *(q, results, score_mma, held_mma, sq, units, ropes, rings, exchange, tile, scale, tid, warp, lane),
            )
        else:
            cute.arch.setmaxregister_increase(OUTPUT_REGISTERS)
            self.accumulate(
                *(results, value_mma, units, rings, exchange, tile),
                *(tid % WARPGROUP, warp % 4, lane, warp // 4 - 1),
            )

    @cute.jit
    def take_queries(self, sq, held, units, ropes, rings: LatentRings, ring, tid, warp, lane):
        """They came as a tile of keys does, row by row."""
        unit, unit_phase, rope, rope_phase = ring
        words = cute.make_tensor(
            cute.recast_ptr(held.iterator, dtype=cutlass.Uint32), cute.make_layout((4, CHUNK // 16, self.held))
        )
        target = cute.recast_ptr(sq.iterator, cute.make_swizzle(0, 4, 3), dtype=self.dtype)
        vector = cute.make_rmem_tensor((8,), self.dtype)
        for n, chunk in enumerate(self.order):
            memory, place = units, unit * UNIT_CHUNKS + chunk % UNIT_CHUNKS
            if const_expr(chunk < VALUE // CHUNK):
                cute.arch.mbarrier_wait(rings.unit_full + place, unit_phase)
            else:
                cute.arch.mbarrier_wait(rings.rope_full + rope, rope_phase)
                memory, place = ropes, rope
            source = cute.recast_ptr(memory.iterator, cute.make_swizzle(0, 4, 3), dtype=self.dtype)
            source += place * (ROWS * CHUNK)
            if const_expr(n < self.held):
                for step in cutlass.range_constexpr(CHUNK // 16):
                    address = source + swizzled(warp * 16 + lane % 16, 2 * step + lane // 16)
                    for i, word in enumerate(load_matrices(Int32(address.toint()))):
                        words[i, step, n] = word
            else:
                # A warp's own rows: another's may still be multiplied with the keys of the piece before.
                for i in cutlass.range_constexpr(ROWS * CHUNK // (8 * WARPGROUP)):
                    here = warp * (ROWS * CHUNK // 32) + i * 32 + lane
                    cute.autovec_copy(cute.make_tensor(source + here * 8, cute.make_layout(8)), vector)
                    there = cute.make_tensor(target + ((n - self.held) * ROWS * CHUNK + here * 8), cute.make_layout(8))
                    cute.autovec_copy(vector, there)
            if const_expr(chunk < VALUE // CHUNK and chunk % UNIT_CHUNKS == UNIT_CHUNKS - 1):
                cute.arch.sync_warp()
                self.memory.release(rings.unit_empty + unit)
                unit, unit_phase = advance(unit, unit_phase, self.memory.units)
        self.memory.release(rings.rope_empty + rope)
        rope, rope_phase = advance(rope, rope_phase, self.memory.ropes)
        return unit, unit_phase, rope, rope_phase

    @cute.jit
    def place(self, sequence, tile: RowTile, row):
        return *divmod(sequence, tile.queries), row

    @cute.jit
    def hide(
        self, flat, state: SoftmaxState, rings: LatentRings, units, ring, piece: Piece, tile: RowTile, key, tid, lane
    ):
        bits = cute.make_rmem_tensor((4,), cutlass.Uint32)
        cute.autovec_copy(rings.present[None, ring[2]], bits)
        if bits[0] & bits[1] & bits[2] & bits[3] != 0xFFFF:
            for i in cutlass.range_constexpr(TILE // 2):
                column = i // 4 % 2 * 8 + lane % 4 * 2 + i % 2  # of 16
                if (bits[i // 8] >> column) & 1 == 0:
                    flat[i] = -Float32(float("inf"))


@cached
def compile_sparse_mla(dtype: str, channels: int, lists: int, highest: bool):
    """-> f(q [T, 1, h, d], caches [pages, P, d], indices [T, K], counts [n], counted, sink [m], has_sink, out
    [T / s_q, s_q, h, 512], lse [T / s_q, h, s_q], out_parts [slots, 1, h, 512], lse_parts [slots, 1, h], max_logits
    [T, h] or None, scale * log2(e), s_q, parts, rounds, cut); caches, indices and counts are lists; T, h, pages > 0

    Query t has counts[t // s_q] keys of its K in list i if bit i of `counted` is set. Rows of q and of the caches start
    at multiples of 16 bytes. Queries behind rounds * parts are cut, with 2 * cut slots (Share); with `highest`, which
    is when there are max_logits, none may be.
    """
    kind = cute_dtype(dtype)
    queries, heads = cute.sym_int(), cute.sym_int()

    def cache():
        return fake(kind, (cute.sym_int(), cute.sym_int(), channels), (*strides(2, 8), 1), 16)

    return compile_sm90(
        SparseMlaSm90(kind, channels, highest),
        fake(kind, (queries, 1, heads, channels), (*strides(3, 8), 1), 16),
        *fake_lists(queries, lists, cache),
        *fake_sink(),
        *fake_results(kind, heads),
        fake(Float32, (queries, heads), (*strides(1), 1), 4) if highest else None,
        *(Float32(0.0), Int32(0), Int32(0), Int32(0), Int32(0)),
        fake_stream(),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the ops can ask for."""
    return [
        (compile_sparse_mla, (dtype, channels, lists, highest))
        for channels in (LATENT, VALUE)
        for dtype in ("bfloat16", "float16")
        for lists, highest in ((1, False), (2, False), (1, True))
    ]
