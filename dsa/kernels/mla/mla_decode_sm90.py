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
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.fake_tensors import cute_dtype
from dsa.cute.sm90 import opaque
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
from dsa.kernels.mla.mla_queries import ROWS, request_queries
from dsa.kernels.mla.mla_tiles import LATENT, TILE, UNIT_CHUNKS, VALUE, DecodeInputs, LatentRings, PagedTiles, zero_rows

HELD = 5  # chunks of Q in registers
UNITS, ROPES = 10, 2


class MlaDecodeSm90(LatentAttention):
    """`box` keys lie in the same page; `cluster` CTAs share the keys."""

    def __init__(self, dtype: type[cutlass.Numeric], box: int, cluster: int):
        super().__init__(PagedTiles(dtype, box, UNITS, ROPES, cluster), LATENT, HELD)
        self.cluster = cluster

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
        atom, keys = self.memory.load_atom(cache)
        score, score_held, value = self.multiplications()
        q_layout, unit_layout, rope_layout = self.q_layout(), self.memory.unit_layout(), self.memory.rope_layout()

        @cute.struct
        class Storage:
            rings: self.memory.storage()
            exchange: self.exchange_storage()
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            units: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(unit_layout)], 1024]
            ropes: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(rope_layout)], 1024]

        self.storage = Storage
        page_boxes = cute.fast_divmod_create_divisor_v2(cache.shape[1] // self.memory.box)
        row_tiles = (q.shape[1] * (q.shape[2] // cache.shape[2]) + ROWS - 1) // ROWS
        parts = plan.shape[0]
        if fixed_splits > 0:
            parts = lengths.shape[0] * fixed_splits
        self.kernel(
            *(atom, keys, q, block_table, lengths, plan, num_splits, out, lse, out_parts, lse_parts),
            *(scale, causal, capacity, fixed_splits, page_boxes, row_tiles),
            *(score, score_held, value, q_layout, unit_layout, rope_layout),
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
        unit_layout: cute.ComposedLayout,
        rope_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        block, kv_head, _ = cute.arch.block_idx()
        part, row_tile = block // row_tiles, block % row_tiles
        storage = SmemAllocator().allocate(self.storage)
        rings, exchange = self.memory.rings(storage.rings), self.exchange(storage.exchange)
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        units = storage.units.get_tensor(unit_layout.outer, swizzle=unit_layout.inner)
        ropes = storage.ropes.get_tensor(rope_layout.outer, swizzle=rope_layout.inner)

        if warp == 12:
            cute.nvgpu.cpasync.prefetch_descriptor(atom)
        if tid == 0:
            self.memory.init(rings, 1, 1)
            exchange.init()
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
        tile = RowTile(q.shape[1], heads, q.shape[1] * heads, row_tile * ROWS, kv_head, causal)
        results = Results(out, lse, out_parts, lse_parts)
        if warp >= 12:
            cute.arch.setmaxregister_decrease(LOADER_REGISTERS)
            if warp == 12:
                inputs = DecodeInputs(
                    *(lengths, block_table, plan, num_splits, page_boxes, capacity, fixed_splits),
                )
                boxes, rope_boxes = self.memory.box_layout(UNITS * UNIT_CHUNKS), self.memory.box_layout(ROPES)
                rank = block % self.cluster
                self.memory.load(
                    *(atom, mk, storage.units.get_tensor(boxes.outer, swizzle=boxes.inner)),
                    storage.ropes.get_tensor(rope_boxes.outer, swizzle=rope_boxes.inner),
                    *(rings, inputs, part, kv_head, rank, lane, out_parts.shape[0]),
                )
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
        if const_expr(self.cluster > 1):
            # The other CTA may still write to this one's shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def request_queries(self, q, sq, held, sequence, tile: RowTile, tid, warp, lane):
        request_queries(q, sq, held, self.order, sequence, tile.heads, tile.rows, tile.first, tile.kv_head, warp, lane)

    @cute.jit
    def take_queries(self, sq, held, units, ropes, rings: LatentRings, ring, tid, warp, lane):
        cute.arch.cp_async_wait_group(0)
        return ring

    @cute.jit
    def place(self, sequence, tile: RowTile, row):
        return sequence, row // tile.heads, tile.kv_head * tile.heads + row % tile.heads

    @cute.jit
    def begin(self, state: SoftmaxState, piece: Piece, tile: RowTile, own_row):
        for r in cutlass.range_constexpr(2):
            state.limits[r] = piece.length
            if tile.causal > 0:
                query = opaque(tile.first + own_row + 8 * r) // tile.heads
                state.limits[r] = cutlass.min(piece.length, piece.seen - tile.queries + 1 + query)

    @cute.jit
    def hide(
        self, flat, state: SoftmaxState, rings: LatentRings, units, ring, piece: Piece, tile: RowTile, key, tid, lane
    ):
        unit, _, rope, _ = ring
        bits = rings.present[0, rope]
        every = 2**self.memory.boxes - 1
        least = piece.length
        if tile.causal > 0:
            least = cutlass.min(piece.length, piece.seen - tile.queries + 1)
        if key + TILE > least or bits != every:
            for i in cutlass.range_constexpr(TILE // 2):
                column = i // 4 * 8 + lane % 4 * 2 + i % 2
                box = i // 4 * 8 // self.memory.box
                if key + column >= state.limits[i // 2 % 2] or (bits >> box) & 1 == 0:
                    flat[i] = -Float32(float("inf"))
            if key + TILE > piece.length:
                zero_rows(units.iterator, unit, UNITS, piece.length - key, tid)


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
