"""Sparse MLA attention over selected latents of an FP8 cache: decoding, any number of heads.

o[t, h] = softmax_j(scale * q[t, h] . k[j]) k[j, :512] over the keys j of query t; q and k of 576 or 512 channels

Plan
- Keys are the rows of both products, heads their columns: S^T = K Q^T, O^T += V^T P^T. So keys are operands in
  registers, and go there from bytes by way of nothing else: no copy of them in 16 bits is ever stored.
- A CTA has `rows` heads of a query, 16, 32 or 64, and runs through the tiles of 64 of its keys, query after query or in
  shares (gathered_tiles.py). The fourth warpgroup loads (byte_tiles.py).
- One warpgroup scores (byte_scores.py): S^T of 64 keys by wgmma, Q in shared memory; softmax; P^T to shared memory. Two
  accumulate (byte_values.py): each has 256 channels x `rows` of O^T. All three read the bytes.
- All products of bytes are of f16, in which e4m3 is exact: two numbers are turned by one instruction. Scores are
  multiplied by the scales in fp32; values are, in f16, by the scale in two parts.
Shared memory: Q, two P^T, SLOTS tiles of bytes.
Registers: the scoring, two accumulating and the loading warpgroup have 512 a lane together.
Launch: programmatic. Partial results are combined by sparse_mla_combine_sm90.py.
Roofline: of a tile of 64 heads wgmma takes 2176 clocks; shared memory delivers 82 KiB of bytes, 72 of Q, 64 of P^T and
takes in 41 and 8: 2140 clocks. Memory delivers a tile to all multiprocessors at once in 2300 clocks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.kernels.mla.fp8_kv_scores import ByteScores
from dsa.kernels.mla.fp8_kv_tiles import V4_BYTES, V32_BYTES, ByteTiles
from dsa.kernels.mla.fp8_kv_values import ByteValues
from dsa.kernels.mla.mla_attention import WARPGROUP, Results
from dsa.kernels.mla.mla_tiles import LATENT, TILE, VALUE
from dsa.kernels.mla.sparse_arguments import fake_lists, fake_results, fake_sink, selections
from dsa.kernels.mla.swap_ab_exchange import ExchangeMemory, Thread
from dsa.kernels.mla.topk_gather import Selection, Share

# Scoring warpgroups, by the heads of a CTA; registers of a scoring, an accumulating and the loading one.
SCORERS = {16: 2, 32: 2, 64: 1}
REGISTERS = {16: (104, 104, 56), 32: (104, 120, 32), 64: (136, 176, 24)}
SLOTS = {16: 4, 32: 4, 64: 3}  # tiles of bytes
LOG2E = 1.4426950408889634


class SparseMlaBytesSm90:
    """Keys of `channels` numbers; `rows` heads of a CTA."""

    def __init__(self, channels: int, rows: int):
        self.channels, self.rows = channels, rows
        self.scorers = SCORERS[rows]
        self.memory = ByteTiles(channels, rows, SLOTS[rows], self.scorers)
        self.exchange_memory = ExchangeMemory(None, channels, rows, self.scorers)
        self.scores, self.values = ByteScores(self.memory, rows), ByteValues(self.memory, rows)

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
        scale: Float32,
        group: Int32,
        parts: Int32,
        rounds: Int32,
        cut: Int32,
        stream,
    ):
        @cute.struct
        class Storage:
            rings: self.memory.storage()
            sink: cute.struct.MemRange[Float32, self.rows]
            exchange: self.exchange_memory.storage()
            raw: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, SLOTS[self.rows] * self.memory.slot_bytes], 128]

        assert Storage.size_in_bytes() <= 232448
        self.storage = Storage
        lists = selections(caches, indices, counts, counted)
        row_tiles = (q.shape[2] + self.rows - 1) // self.rows
        self.kernel(
            *(q, lists, Results(out, lse, out_parts, lse_parts), sink, has_sink),
            *(scale, cute.fast_divmod_create_divisor_v2(group), parts, rounds, cut, row_tiles),
            *(self.scores.multiplications(), self.values.multiplication(), self.exchange_memory.layouts()),
        ).launch(
            grid=(parts * row_tiles, 1, 1),
            block=((self.scorers + 3) * WARPGROUP, 1, 1),
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
        score_mmas: tuple[cute.TiledMma, cute.TiledMma],
        value_mma: cute.TiledMma,
        layouts: tuple[cute.ComposedLayout, cute.ComposedLayout],
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        part, first_row = block // row_tiles, block % row_tiles * self.rows
        storage = SmemAllocator().allocate(self.storage)
        rings = self.memory.rings(storage.rings)
        exchange = self.exchange_memory.exchange(storage.exchange, *layouts)
        raw = Int32(storage.raw.data_ptr().toint())
        if tid == 0:
            self.memory.init(rings)
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
            if has_sink > 0 and first_row + tid < heads:
                own_sink[tid] = sink[first_row + tid] * LOG2E
        results = replace(results, sink=own_sink)
        score_registers, output_registers, loader_registers = REGISTERS[self.rows]
        if warp >= 4 * self.scorers + 8:
            cute.arch.setmaxregister_decrease(loader_registers)
            tiles = sum((selection.indices.shape[1] + TILE - 1) // TILE for selection in lists)
            share = Share(part, parts, rounds, q.shape[0], cutlass.max(tiles, 1), cut)
            self.memory.load(q, raw, rings, lists, group, share, first_row, warp % 4, lane)
        elif warp < 4 * self.scorers:
            cute.arch.setmaxregister_increase(score_registers)
            thread = Thread(Int32(0) if const_expr(self.scorers == 1) else warp // 4, warp % 4, lane)
            self.scores.run(results, score_mmas, raw, rings, exchange, (first_row, heads), group, scale, thread)
        else:
            cute.arch.setmaxregister_increase(output_registers)
            thread = Thread(warp // 4 - self.scorers, warp % 4, lane)
            self.values.run(results, value_mma, raw, rings, exchange, (first_row, heads), group, thread)


@cached
def compile_sparse_mla_bytes(channels: int, rows: int, lists: int):
    """-> f(q [T, 1, h, d], caches [pages, P, 656 | 584], indices [T, K], counts [n], counted, sink [m], has_sink, out
    [T / s_q, s_q, h, 512], lse [T / s_q, h, s_q], out_parts [slots, 1, h, 512], lse_parts [slots, 1, h], scale *
    log2(e), s_q, parts, rounds, cut), as `compile_sparse_mla`; pages are contiguous."""
    queries, heads = cute.sym_int(), cute.sym_int()
    width = V32_BYTES if channels == LATENT else V4_BYTES

    def cache():
        return fake(cutlass.Uint8, (cute.sym_int(), cute.sym_int(), width), (*strides(1, 16), width, 1), 16)

    return compile_sm90(
        SparseMlaBytesSm90(channels, rows),
        fake(BFloat16, (queries, 1, heads, channels), (*strides(3, 8), 1), 16),
        *fake_lists(queries, lists, cache),
        *fake_sink(),
        *fake_results(BFloat16, heads),
        *(Float32(0.0), Int32(0), Int32(0), Int32(0), Int32(0)),
        fake_stream(),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_sparse_mla_bytes, (channels, rows, lists))
        for channels in (LATENT, VALUE)
        for rows in (16, 32, 64)
        for lists in (1, 2)
    ]
