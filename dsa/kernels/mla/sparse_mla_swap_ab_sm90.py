"""Sparse MLA attention over selected latents in 16 bits, few heads: prefill and decoding with up to 32 heads.

o[t, h] = softmax_j(scale * q[t, h] . k[j]) k[j, :512] over the keys j of query t; q and k of 576 or 512 channels

Plan
- As sparse_mla_sm90.py, but heads are the columns of the products and keys and channels their rows
  (column_attention.py): 16 heads take a quarter of the products' time of 64.
- A CTA has all heads of a query. It gathers the keys and takes its share of the work as there (gathered_tiles.py).
Shared memory: Q, two P^T, a ring of units of 16 KiB and one of rope parts: two to three tiles.
Launch: programmatic. Partial results are combined by sparse_mla_combine_sm90.py.
Roofline: of a tile of 576 channels shared memory takes in 72 KiB and gives 136 to the products, with 32 of Q and P for
16 heads: 1920 clocks. The L2 cache delivers a tile to every multiprocessor in 1850 (measured by plain loads).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.kernels.mla.mla_attention import WARPGROUP, Results
from dsa.kernels.mla.mla_tiles import LATENT, TILE, VALUE
from dsa.kernels.mla.sparse_arguments import fake_lists, fake_results, fake_sink, selections
from dsa.kernels.mla.swap_ab_attention import SCORERS, ColumnAttention, RowRange
from dsa.kernels.mla.swap_ab_exchange import ExchangeMemory, Thread
from dsa.kernels.mla.topk_gather import GatheredTiles, Selection, Share, TileMemory

ROPES = 2
LOG2E = 1.4426950408889634
UNITS = {(LATENT, 16): 11, (LATENT, 32): 9, (VALUE, 16): 12, (VALUE, 32): 10}
SCORE_REGISTERS, OUTPUT_REGISTERS, LOADER_REGISTERS = 96, 112, 64


class SparseMlaFewSm90(ColumnAttention):
    """Keys of `channels` numbers; `rows` heads, 16 or 32; `highest`: max_logits are wanted."""

    def __init__(self, dtype: type[cutlass.Numeric], channels: int, rows: int, highest: bool):
        super().__init__(GatheredTiles(dtype, channels, UNITS[channels, rows], ROPES), channels, rows, highest)
        self.exchange_memory = ExchangeMemory(dtype, channels, rows, SCORERS)

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
        unit_layout, rope_layout = self.memory.unit_layout(), self.memory.rope_layout()

        @cute.struct
        class Storage:
            rings: self.memory.storage()
            sink: cute.struct.MemRange[Float32, self.rows]
            exchange: self.exchange_memory.storage()
            staging: cute.struct.Align[cute.struct.MemRange[self.dtype, 8 * 16 * self.rows], 128]
            units: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(unit_layout)], 1024]
            # Keys of 512 channels have no part of their own for rope.
            ropes: cute.struct.Align[
                cute.struct.MemRange[self.dtype, cute.cosize(rope_layout) if self.memory.rope else 8], 1024
            ]

        assert Storage.size_in_bytes() <= 232448
        self.storage = Storage
        results = Results(out, lse, out_parts, lse_parts, max_logits)
        self.kernel(
            *(q, selections(caches, indices, counts, counted), results, sink, has_sink),
            *(scale, cute.fast_divmod_create_divisor_v2(group), parts, rounds, cut),
            *(self.multiplications(), self.exchange_memory.layouts(), (unit_layout, rope_layout)),
        ).launch(
            grid=(parts, 1, 1),
            block=((SCORERS + 3) * WARPGROUP, 1, 1),
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
        mmas: tuple[cute.TiledMma, cute.TiledMma],
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
        tile_layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        part, _, _ = cute.arch.block_idx()
        storage = SmemAllocator().allocate(self.storage)
        rings = self.memory.rings(storage.rings)
        exchange = self.exchange_memory.exchange(storage.exchange, *layouts)
        unit_layout, rope_layout = tile_layouts
        tiles = TileMemory(
            storage.units.get_tensor(unit_layout.outer, swizzle=unit_layout.inner),
            storage.ropes.get_tensor(rope_layout.outer, swizzle=rope_layout.inner),
        )
        if tid == 0:
            self.memory.init_gathered(rings, 4 * SCORERS + 8)
            self.exchange_memory.init(exchange)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        # What is behind this point touches global memory: the kernels before must be done with it.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        heads = q.shape[2]
        own_sink = storage.sink.get_tensor(cute.make_layout(self.rows))
        if tid < self.rows:
            own_sink[tid] = -Float32(float("inf"))
            if has_sink > 0 and tid < heads:
                own_sink[tid] = sink[tid] * LOG2E
        results = replace(results, sink=own_sink)
        rows = RowRange(Int32(0), heads)
        thread = Thread(warp // 4 % SCORERS, warp % 4, lane)
        if warp >= 4 * SCORERS + 8:
            cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            count = sum((selection.indices.shape[1] + TILE - 1) // TILE for selection in lists)
            share = Share(part, parts, rounds, q.shape[0], cutlass.max(count, 1), cut)
            self.memory.load(q, tiles, rings, lists, group, share, rows.first, warp % 4, lane)
        elif warp < 4 * SCORERS:
            cute.arch.setmaxregister_increase(SCORE_REGISTERS)
            self.score(results, mmas[0], tiles, rings, exchange, rows, group, scale, thread)
        else:
            cute.arch.setmaxregister_increase(OUTPUT_REGISTERS)
            staging = storage.staging.data_ptr()
            self.accumulate(results, mmas[1], tiles, rings, exchange, staging, rows, group, thread)


@cached
def compile_sparse_mla_few(dtype: str, channels: int, rows: int, lists: int, highest: bool):
    """-> f as `compile_sparse_mla` gives it, for h <= rows, 16 or 32."""
    kind = cute_dtype(dtype)
    queries, heads = cute.sym_int(), cute.sym_int()

    def cache():
        return fake(kind, (cute.sym_int(), cute.sym_int(), channels), (*strides(2, 8), 1), 16)

    return compile_sm90(
        SparseMlaFewSm90(kind, channels, rows, highest),
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
        (compile_sparse_mla_few, (dtype, channels, rows, lists, highest))
        for channels in (LATENT, VALUE)
        for rows in (16, 32)
        for dtype in ("bfloat16", "float16")
        for lists, highest in ((1, False), (2, False), (1, True))
    ]
