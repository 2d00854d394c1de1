"""Dense MLA decoding over a paged latent cache, for any number of rows (query tokens x heads) per KV head.

o[r] = sum_j softmax_j(scale * q[r] . k[j]) k[j, :512],  where r is a row of one sequence and KV head

q and k have 576 channels.

Work: a CTA computes TILE_M rows, a row tile. Its work tiles are sequences or splits of sequences (decode_producer.py),
which the CTA computes in tiles of TILE_N keys. If `cluster` is 2, two CTAs with adjacent row tiles form a cluster; the
number of row tiles is then even. The two CTAs need the same keys, so each CTA loads half of the keys' bytes and
multicasts that half to both.
Warp roles: one score and two output warpgroups (mla_attention.py). One warp of the load warpgroup loads keys
by TMA (decode_producer.py). The score warpgroup loads Q itself.
Pipelines: the load warp produces work tiles and keys; the score warpgroup produces P (mla_attention.py). With a plan,
the load warp announces a work tile's sequence before it has loaded the sequence's length, so that the score warpgroup
can load Q early. In batch-invariant decoding the load warp needs the length first, to know whether the CTA's split
exists.
Split-KV: the result of a work tile that is a whole sequence goes to out and lse. For a split, the kernel writes a
normalised partial result. mla_combine_sm90.py combines the partial results of a sequence.
Shared memory: the chunks of Q that are not in registers, two stages of P, and V_STAGES x 16 KiB + ROPE_STAGES
x 8 KiB of keys, about two and a half tiles.
Launch: programmatic dependent launch.
Constraints: limits.py; `box` divides the page size; rows of q and of the cache start at multiples of 16
bytes.
Roofline: per tile of keys, wgmma takes 2176 cycles. Shared memory takes 2240: it delivers 72 KiB of K and 32 KiB of
Q for S, 64 KiB of V and 32 KiB of P for O, and receives 72 KiB of keys and 8 KiB of P. DRAM takes 4000 cycles
to deliver one tile to every SM. With one row tile the kernel is bound by memory. With more row tiles it is bound
by compute and power and reaches 80 to 86% of the rate of a bf16 GEMM.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.pipeline import PipelineState
from dsa.cute.shared_memory import swizzled
from dsa.cute.sm90 import WARPGROUP, opaque
from dsa.kernels.mla.decode_producer import DecodeScheduler, PagedLoad, Pages, zero_rows
from dsa.kernels.mla.limits import DTYPES, HEAD_DIM, HEAD_DIM_V, TILE_M, TILE_N
from dsa.kernels.mla.mla_attention import (
    Q_RMEM_CHUNKS,
    REGISTERS,
    THREADS,
    MlaAttention,
    NamedBarrier,
    TiledMmas,
    WarpRole,
)
from dsa.kernels.mla.mla_epilogue import Epilogue
from dsa.kernels.mla.mla_roles import MlaShared, QTile, Results, WorkTileInfo
from dsa.kernels.mla.mla_softmax import SoftmaxState
from dsa.kernels.mla.mla_tiles import K_CHUNK, K_PER_V, KvState
from dsa.runtime.compile_cache import cached, compile_sm90

V_STAGES, ROPE_STAGES = 10, 2


@dataclass(frozen=True)
class DecodeQTile(QTile):
    """The rows of a sequence and KV head: row i is head i % `heads` of query token i / `heads`.

    queries  number of query tokens of a sequence
    heads    query heads per KV head
    causal   > 0: the last query token sees the first `WorkTileInfo.seen` keys, and each query token one key less than
             the next one. Otherwise all query tokens see all keys
    """

    queries: Int32
    heads: Int32
    causal: Int32

    @cute.jit
    def coord(self, sequence, row):
        return sequence, row // self.heads, self.kv_head * self.heads + row % self.heads


class MlaDecodeSm90(MlaAttention):
    """Dense MLA decoding.

    box      keys per TMA box; a box lies in one page
    cluster  CTAs per cluster, which share the loads of keys
    """

    def __init__(self, dtype: type[cutlass.Numeric], box: int, cluster: int):
        super().__init__(PagedLoad(dtype, box, V_STAGES, ROPE_STAGES, cluster), HEAD_DIM, Epilogue(dtype))
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
        out_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        scale: Float32,
        causal: Int32,
        capacity: Int32,
        fixed_splits: Int32,
        stream,
    ):
        atom, keys = self.kv.load_atom(cache)

        @cute.struct
        class Storage:
            pipeline: self.kv.storage()
            exchange: self.exchange_memory.storage()
            operands: self.operand_storage()

        self.storage = Storage
        page_boxes = cute.fast_divmod_create_divisor_v2(cache.shape[1] // self.kv.box)
        row_tiles = (q.shape[1] * (q.shape[2] // cache.shape[2]) + TILE_M - 1) // TILE_M
        parts = plan.shape[0]
        if fixed_splits > 0:
            parts = lengths.shape[0] * fixed_splits
        self.kernel(
            *(atom, keys, q, block_table, lengths, plan, num_splits, out, lse, out_partial, lse_partial),
            *(scale, causal, capacity, fixed_splits, page_boxes, row_tiles, self.tiled_mmas()),
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
        out_partial: cute.Tensor,
        lse_partial: cute.Tensor,
        scale: Float32,
        causal: Int32,
        capacity: Int32,
        fixed_splits: Int32,
        page_boxes: cute.FastDivmodDivisorV2,
        row_tiles: Int32,
        mmas: TiledMmas,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        block, kv_head, _ = cute.arch.block_idx()
        part, row_tile = block // row_tiles, block % row_tiles
        storage = SmemAllocator().allocate(self.storage)
        shared = self.shared(storage)

        if warp == WarpRole.LOAD:
            cute.nvgpu.cpasync.prefetch_descriptor(atom)
        if tid == 0:
            self.kv.init(shared.pipeline, consumers=WarpRole.LOAD)  # all warps before the load warp
            shared.exchange.init()
        cute.arch.mbarrier_init_fence()
        if const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        wait_for_prerequisite_grids()

        heads = q.shape[2] // mk.shape[2]
        q_tile = DecodeQTile(q.shape[1] * heads, row_tile * TILE_M, kv_head, q.shape[1], heads, causal)
        results = Results(out, lse, out_partial, lse_partial)
        if warp >= WarpRole.LOAD:
            cute.arch.setmaxregister_decrease(REGISTERS.load)
            if warp == WarpRole.LOAD:
                scheduler = DecodeScheduler(lengths, plan, num_splits, capacity, fixed_splits)
                boxes, rope_boxes = self.kv.box_layout(V_STAGES * K_PER_V), self.kv.box_layout(ROPE_STAGES)
                self.kv.load(
                    *(atom, mk, storage.operands.kv.v.get_tensor(boxes.outer, swizzle=boxes.inner)),
                    storage.operands.kv.rope.get_tensor(rope_boxes.outer, swizzle=rope_boxes.inner),
                    *(shared.pipeline, scheduler, Pages(block_table, page_boxes)),
                    *(part, kv_head, block % self.cluster, lane, out_partial.shape[0]),
                )
        elif warp < WarpRole.OUTPUT:
            cute.arch.setmaxregister_increase(REGISTERS.score)
            self.score_mainloop(q, results, mmas, shared, q_tile, scale, tid, warp, lane)
        else:
            cute.arch.setmaxregister_increase(REGISTERS.output)
            self.output_mainloop(results, mmas.pv, shared, q_tile, tid % WARPGROUP, warp % 4, lane, warp // 4 - 1)
        if const_expr(self.cluster > 1):
            # Do not exit yet: the other CTA of the cluster can still write to this CTA's shared memory.
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    @cute.jit
    def prefetch_q(self, q, shared: MlaShared, q_rmem, work_state: PipelineState, q_tile: DecodeQTile, warp, lane):
        """Start to load Q: the first Q_RMEM_CHUNKS k chunks of `order` to registers, the other k chunks to shared
        memory.

        Nothing needs to wait for the registers, because the first instruction that reads a register waits for that
        register's load. The chunks in shared memory are complete after `cp_async_wait_group(0)` and a barrier. Rows
        past the last one are zeros. The score warps start these loads as soon as the load warp has announced the
        sequence, before it loads the first keys. Otherwise Q would arrive after these keys.
        """
        sequence = shared.pipeline.work.announced(work_state)
        if sequence >= 0:
            # Before Q in shared memory is overwritten, all warps must be done with the previous work tile's Q: PTX
            # does not say which rows of Q a warp of the warpgroup reads for a wgmma.
            cute.arch.barrier(barrier_id=NamedBarrier.SCORE, number_of_threads=WARPGROUP)
            lane, rows, first_row = opaque(lane), q_tile.rows, q_tile.first_row
            target = cute.recast_ptr(shared.q.iterator, cute.make_swizzle(0, 4, 3), dtype=self.dtype)
            for i in cutlass.range_constexpr(TILE_M // 16):
                row = warp * 16 + 4 * i + lane // 8
                source = self.q_row(q, q_tile, sequence, first_row + row) + lane % 8 * 8
                for n in cutlass.range_constexpr(Q_RMEM_CHUNKS, len(self.order)):
                    place = target + ((n - Q_RMEM_CHUNKS) * TILE_M * K_CHUNK + swizzled(row, lane % 8))
                    load_16_or_zeros(place, source + self.order[n] * K_CHUNK, first_row + row < rows)
            # The layout of wgmma's operand A in registers: 16 channels are eight pairs. A lane has pairs lane % 4 and
            # lane % 4 + 4, in rows lane / 4 and lane / 4 + 8 of the warp's 16 rows.
            words = cute.make_tensor(
                cute.recast_ptr(q_rmem.iterator, dtype=Uint32), cute.make_layout((2, 2, K_CHUNK // 16 * Q_RMEM_CHUNKS))
            )
            for r in cutlass.range_constexpr(2):
                row = first_row + warp * 16 + lane // 4 + 8 * r
                pointer = cute.recast_ptr(self.q_row(q, q_tile, sequence, row), dtype=Uint32)
                pairs = cute.make_tensor(pointer + lane % 4, cute.make_layout((2, HEAD_DIM // 16), stride=(4, 8)))
                for n in cutlass.range_constexpr(Q_RMEM_CHUNKS):
                    for step in cutlass.range_constexpr(K_CHUNK // 16):
                        for k in cutlass.range_constexpr(2):
                            of_chunk = self.order[n] * (K_CHUNK // 16) + step
                            words[r, k, n * (K_CHUNK // 16) + step] = pairs[k, of_chunk]
                if row >= rows:
                    for i in cutlass.range_constexpr(K_CHUNK // 16 * Q_RMEM_CHUNKS):
                        for k in cutlass.range_constexpr(2):
                            words[r, k, i] = Uint32(0)

    @cute.jit
    def q_row(self, q, q_tile: DecodeQTile, sequence, row):
        """Return the address of a row of Q, or of the last row if `row` is past it."""
        return q[*q_tile.coord(sequence, cutlass.min(row, q_tile.rows - 1)), None].iterator

    @cute.jit
    def load_q(self, shared: MlaShared, q_rmem, state: KvState, warp, lane) -> KvState:
        cute.arch.cp_async_wait_group(0)
        return state

    @cute.jit
    def prologue(self, softmax: SoftmaxState, work: WorkTileInfo, q_tile: DecodeQTile, tile_row):
        for r in cutlass.range_constexpr(2):
            softmax.limits[r] = work.length
            if q_tile.causal > 0:
                query = opaque(q_tile.first_row + tile_row + 8 * r) // q_tile.heads
                softmax.limits[r] = cutlass.min(work.length, work.seen - q_tile.queries + 1 + query)

    @cute.jit
    def apply_mask(
        self,
        scores,
        softmax: SoftmaxState,
        shared: MlaShared,
        state: KvState,
        work: WorkTileInfo,
        q_tile: DecodeQTile,
        key,
        tid,
        lane,
    ):
        mask = shared.pipeline.valid_mask[0, state.rope.stage]
        least = work.length
        if q_tile.causal > 0:
            least = cutlass.min(work.length, work.seen - q_tile.queries + 1)
        if key + TILE_N > least or mask != 2**self.kv.boxes - 1:
            for i in cutlass.range_constexpr(TILE_N // 2):
                column = i // 4 * 8 + lane % 4 * 2 + i % 2
                if key + column >= softmax.limits[i // 2 % 2] or (mask >> (i // 4 * 8 // self.kv.box)) & 1 == 0:
                    scores[i] = -Float32(float("inf"))
            if key + TILE_N > work.length:
                zero_rows(shared.kv.v.iterator, state.v.stage, V_STAGES, work.length - key, tid)


@cute.jit
def load_16_or_zeros(target: cute.Pointer, source: cute.Pointer, valid: Boolean):
    """Copy 16 bytes from global to shared memory by cp.async, as one committed group. Both addresses are aligned to 16
    bytes. If not `valid`, write zeros and read nothing."""
    size = Int32(16) if valid else Int32(0)
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2}; cp.async.commit_group;",
        read_only_args=[Int32(target.toint()), Int64(source.toint()), size],
    )


@cached
def compile_mla_decode(dtype: str, box: int, cluster: int):
    """Compile f(q [B, s_q, h_q, 576], cache [pages, P, h_k, 576], block_table [B, max_pages], lengths [B],
    plan [parts, 8], num_splits [B + 1], out [B, s_q, h_q, 512], lse [B, h_q, s_q], out_partial
    [splits, h_k, rows, 512], lse_partial [splits, h_k, rows], scale * log2(e), causal, capacity,
    fixed_splits).

    B, s_q, pages, max_pages > 0; h_k divides h_q; rows = s_q * h_q / h_k; P is a multiple of `box`; the number of row
    tiles is a multiple of `cluster`. out has q's dtype; lse and partial results are fp32; the other tensors are int32.
    Rows of q and of the cache start at multiples of 16 bytes. For plan, num_splits, capacity and fixed_splits see
    `DecodeScheduler`; for causal see `DecodeQTile`.
    """
    kind = cute_dtype(dtype)
    batch, queries, heads, kv_heads, splits = (cute.sym_int() for _ in range(5))
    rows = cute.sym_int()
    return compile_sm90(
        MlaDecodeSm90(kind, box, cluster),
        fake(kind, (batch, queries, heads, HEAD_DIM), (*strides(3, 8), 1)),
        fake(kind, (cute.sym_int(), cute.sym_int(), kv_heads, HEAD_DIM), (*strides(3, 8), 1)),
        fake(Int32, (batch, cute.sym_int()), (*strides(1), 1), 4),
        fake(Int32, (batch,), strides(1), 4),
        fake(Int32, (cute.sym_int(), 8), (8, 1), 4),
        fake(Int32, (cute.sym_int(),), (1,), 4),
        fake(kind, (batch, queries, heads, HEAD_DIM_V), (*strides(2, 8), HEAD_DIM_V, 1)),
        fake(Float32, (batch, heads, queries), (*strides(2), 1), 4),
        fake(Float32, (splits, kv_heads, rows, HEAD_DIM_V), (*strides(2, 4), HEAD_DIM_V, 1)),
        fake(Float32, (splits, kv_heads, rows), (*strides(2), 1), 4),
        *(Float32(0.0), Int32(0), Int32(0), Int32(0)),
        fake_stream(),
    )


def cluster_of(rows: int) -> int:
    """Return the largest cluster size for `rows` rows (query tokens x heads) per KV head: 2 if the number of row tiles
    is even, otherwise 1."""
    return 2 if -(-rows // TILE_M) % 2 == 0 else 1


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the op can ask for."""
    return [
        (compile_mla_decode, (dtype, box, cluster)) for dtype in DTYPES for box in (16, 32, 64) for cluster in (1, 2)
    ]
