"""Lightning-indexer scores in training: scores[t, j] = sum_h w[t, h] relu(q_h[t] . k[j]) in fp32, from bf16 q and k and
fp32 w. The kernel also stores one active bit per (query, head, key): whether q_h[t] . k[j] > 0. The gradients need only
this bit of the product.

Plan
- As in the FP8 scores of inference (dsa/kernels/indexer), M of a wgmma tile is 64 keys, N is the H heads of N / H
  queries, and K is the D channels of a head. So the sum over heads is FMAs in registers and a reduce-scatter over the
  quad. Consumer warpgroups alternate key tiles, and a tile's epilogue overlaps the next tile's wgmma.
- The caller passes the keys negated, so the accumulators hold -q . k. The sign bit of an accumulator is 1 exactly for
  an active head, and 0 for a product of 0. One funnel shift per accumulator packs 32 sign bits into a word
  (active_bits.py).
- One producer warp loads by TMA: queries into a ring of two stages, and keys into one ring of 64-key stages per
  consumer warpgroup.
- Persistent CTAs with dynamic scheduling. A work tile is N / H queries of a q tile with all keys that at least one of
  them sees (q_tiles.py). Scores and bits after a query's last visible key or after the q tile's last row are undefined:
  readers mask the scores, and the gradient of these scores is 0.
Shared memory: 2 x N x D x 2 bytes of queries, WARPGROUPS x STAGES x 64 x D x 2 bytes of keys, barriers (at most 225
KiB).
Registers: N / 2 accumulators and N / 4 weights per consumer thread, which has 232 registers with two consumer
warpgroups, or 160 with three. A thread of the producer warpgroup has 40 or 32.
Roofline: bound by tensor cores, 1024 cycles per tile of 64 x 256 x 128. The other instructions, three per accumulator,
take about one cycle each and add 400 cycles. Keys come from L2, 16 KB per tile. With 64 heads, the kernel writes 12
bytes per (query, key): 4 of scores and 8 of bits.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.copies import tile_load
from dsa.cute.fake_tensors import fake, fake_stream
from dsa.cute.pipeline import Pipeline, pipeline_storage, start
from dsa.cute.reductions import quad_reduce_scatter
from dsa.cute.sm90 import REGISTERS, SHARED_BYTES, WARPGROUP
from dsa.cute.tile_counter import fake_tile_counter
from dsa.cute.wgmma import multiply
from dsa.cute.work_tile import WorkTilePipeline, work_tile_storage
from dsa.kernels.training.active_bits import negated_head_sum, sign_bits, word_place
from dsa.kernels.training.fake_tensors import ShippedVariants, fake_active, fake_q_tiles, fake_tiles
from dsa.kernels.training.limits import K_TILE, Q_TILE
from dsa.kernels.training.mainloop import (
    accumulator,
    finish_prologue,
    load_stage,
    release,
    smem_layout,
    thread_indices,
    tiled_mma,
    tma_tiles,
)
from dsa.kernels.training.q_tiles import COLUMN_BLOCK, KEY_BLOCK, QTileScheduler, WorkTileInfo
from dsa.runtime.compile_cache import cached, compile_sm90

Q_STAGES = 2


@dataclass(frozen=True)
class IndexerScoresConfig:
    """Configuration of a variant. columns: N of the wgmma. warpgroups: number of consumer warpgroups. stages: number of
    stages of 64 keys per consumer warpgroup."""

    columns: int
    warpgroups: int
    stages: int


# Keyed by (heads, channels). With fewer heads a tile has more queries, and the reductions per query need registers. So
# below 64 heads tiles have 128 columns instead of 256, which leaves room for a third warpgroup. As many stages as fit
# in shared memory, at most 6.
CONFIGS = {
    (8, 64): IndexerScoresConfig(128, 3, 6),
    (8, 128): IndexerScoresConfig(128, 3, 3),
    (16, 64): IndexerScoresConfig(128, 3, 6),
    (16, 128): IndexerScoresConfig(128, 3, 3),
    (32, 64): IndexerScoresConfig(128, 3, 6),
    (32, 128): IndexerScoresConfig(128, 3, 3),
    (64, 64): IndexerScoresConfig(256, 2, 6),
    (64, 128): IndexerScoresConfig(256, 2, 3),
}


class IndexerScoresSm90:
    def __init__(self, heads: int, dim: int, cfg: IndexerScoresConfig):
        self.heads, self.dim, self.cfg = heads, dim, cfg
        self.n, self.warpgroups = cfg.columns, cfg.warpgroups
        self.stages = cfg.warpgroups * cfg.stages
        self.consumer_warps = 4 * cfg.warpgroups  # the next warp is the producer
        self.block_q = cfg.columns // heads
        self.scheduler = QTileScheduler(self.block_q)
        self.words = cfg.columns // COLUMN_BLOCK

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        weights: cute.Tensor,
        q_tiles: cute.Tensor,
        scores: cute.Tensor,
        active: cute.Tensor,
        tile_counter: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        k_layout = smem_layout(KEY_BLOCK, self.dim, BFloat16, self.stages)
        q_layout = smem_layout(self.n, self.dim, BFloat16, Q_STAGES)
        k_atom, k_tma = tile_load(k, k_layout, (KEY_BLOCK, self.dim))
        q_atom, q_tma = tile_load(q, q_layout, (self.n, self.dim))
        mma = tiled_mma(BFloat16, (KEY_BLOCK, self.n))

        @cute.struct
        class Storage:
            k_barriers: pipeline_storage(self.stages)
            q_barriers: pipeline_storage(Q_STAGES)
            work_tiles: work_tile_storage(WorkTileInfo)
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(k_layout)], 1024]

        assert Storage.size_in_bytes() <= SHARED_BYTES
        self.storage = Storage
        threads = (self.warpgroups + 1) * WARPGROUP
        self.kernel(
            q_atom, q_tma, k_atom, k_tma, weights, q_tiles, scores, active, tile_counter, mma, q_layout, k_layout
        ).launch(grid=(ctas, 1, 1), block=(threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        mq: cute.Tensor,
        k_atom: cute.CopyAtom,
        mk: cute.Tensor,
        weights: cute.Tensor,
        q_tiles: cute.Tensor,
        scores: cute.Tensor,
        active: cute.Tensor,
        tile_counter: cute.Tensor,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
    ):
        tid, warp, lane = thread_indices()
        storage = SmemAllocator().allocate(self.storage)
        queries, keys = Pipeline.of(storage.q_barriers, Q_STAGES), Pipeline.of(storage.k_barriers, self.stages)
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        work_tiles = WorkTilePipeline.of(storage.work_tiles, WorkTileInfo)
        if warp == self.consumer_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(q_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(k_atom)
        if tid == 0:
            keys.init(4)
            queries.init(self.consumer_warps)
            work_tiles.init(self.consumer_warps)
        finish_prologue()

        consumer_registers, other_registers = REGISTERS[self.warpgroups]
        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(other_registers)
            if warp == self.consumer_warps:
                self.produce(q_atom, mq, k_atom, mk, q_tiles, tile_counter, work_tiles, sq, sk, queries, keys, lane)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            self.consume(weights, scores, active, mma, work_tiles, sq, sk, queries, keys, tid, warp, lane)

    @cute.jit
    def produce(
        self,
        q_atom,
        mq,
        k_atom,
        mk,
        q_tiles,
        tile_counter,
        work_tiles: WorkTilePipeline,
        sq,
        sk,
        queries: Pipeline,
        keys: Pipeline,
        lane,
    ):
        q_state, k_state, work_state = start(), start(), start()
        warpgroup, number = Int32(0), Int32(0)
        while number >= 0:
            number, q_tile, row, work_state = self.scheduler.advance(
                work_tiles, tile_counter, q_tiles, work_state, lane
            )
            tiles = cute.ceil_div(q_tile.visible_to(row, self.block_q), KEY_BLOCK)
            if number >= 0 and tiles > 0:
                first = (q_tile.first_q + row) * self.heads, 0
                tqs, tqg = tma_tiles(q_atom, sq, mq, (self.n, self.dim), first, (0, 0))
                tks, tkg = tma_tiles(k_atom, sk, mk, (KEY_BLOCK, self.dim), (q_tile.first_k, 0), (None, 0))
                q_state = load_stage(queries, q_state, self.n * self.dim * 2, q_atom, tqg, tqs)
                for tile in cutlass.range(tiles, unroll=1):
                    ring = keys.ring(warpgroup, self.cfg.stages)
                    ring.producer_acquire(k_state, KEY_BLOCK * self.dim * 2)
                    barrier = ring.producer_barrier(k_state)
                    cute.copy(k_atom, tkg[None, tile], tks[None, ring.index(k_state)], tma_bar_ptr=barrier)
                    warpgroup += 1
                    if warpgroup == self.warpgroups:
                        warpgroup = Int32(0)
                        k_state = ring.advance(k_state)

    @cute.jit
    def consume(
        self,
        weights,
        scores,
        active,
        mma,
        work_tiles: WorkTilePipeline,
        sq,
        sk,
        queries: Pipeline,
        keys: Pipeline,
        tid,
        warp,
        lane,
    ):
        thr_mma = mma.get_slice(tid % WARPGROUP)
        ra, rb = mma.make_fragment_A(thr_mma.partition_A(sk)), mma.make_fragment_B(thr_mma.partition_B(sq))
        acc, flat = accumulator(thr_mma, (KEY_BLOCK, self.n))
        sums, words = cute.make_rmem_tensor((2 * self.block_q,), Float32), cute.make_rmem_tensor((self.words,), Uint32)
        sums.fill(0.0)
        words.fill(0)
        w = cute.make_rmem_tensor((self.n // 4,), Float32)
        quad = lane & 3
        k = keys.ring(warp // 4, self.cfg.stages)
        own_key = (warp % 4) * 16 + (lane >> 2)
        own_word = (warp % 4) * 32 + word_place(lane)
        q_state, k_state, work_state = start(), start(), start()
        # The warpgroups also alternate key tiles across work tiles, so their total numbers of key tiles differ by at
        # most one. `mine` is this warpgroup's next key tile in the current work tile.
        mine = warp // 4
        number = Int32(0)
        while number >= 0:
            work_tile = work_tiles.current(work_state)
            work_state = work_tiles.release(work_state)
            number, row, tiles = work_tile.q_tile, work_tile.row, cute.ceil_div(work_tile.visible, KEY_BLOCK)
            if number >= 0 and tiles > 0:
                # Per tile, a lane stores the scores of every fourth query for both of the lane's keys. With two queries
                # per tile, the lane stores the score of one query for one key.
                own_scores = scores[number, None, row + quad, own_key].iterator
                if const_expr(self.block_q == 2):
                    own_scores = scores[number, None, row + (quad >> 1), own_key + 8 * (quad & 1)].iterator
                own_active = active[number, row * self.heads // COLUMN_BLOCK, None, own_word].iterator
                word_stride = active.stride[1]
                for j in cutlass.range_constexpr(self.n // 8):
                    t = cutlass.min(work_tile.first_q + row + j * 8 // self.heads, weights.shape[0] - 1)
                    for c in cutlass.range_constexpr(2):
                        w[2 * j + c] = weights[t, j * 8 % self.heads + quad * 2 + c] * 0.5
                queries.consumer_wait(q_state)
                unfinished = Int32(-1)
                if mine < tiles:
                    k.consumer_wait(k_state)
                while mine < tiles:
                    current = k_state
                    multiply(mma, acc, ra, rb, k.index(current), q_state.stage)
                    # While wgmma runs, store the previous tile and wait for the next tile's keys.
                    self.epilogue(sums, words, own_scores, own_active, word_stride, unfinished, quad)
                    unfinished = mine
                    k_state = k.advance(k_state)
                    mine += self.warpgroups
                    if mine < tiles:
                        k.consumer_wait(k_state)
                    cute.nvgpu.warpgroup.wait_group(0)
                    k.consumer_release(current)
                    for t in cutlass.range_constexpr(self.block_q):
                        sums[2 * t], sums[2 * t + 1] = negated_head_sum(flat, w, t, self.heads)
                    for block in cutlass.range_constexpr(self.words):
                        words[block] = sign_bits(flat, block)
                self.epilogue(sums, words, own_scores, own_active, word_stride, unfinished, quad)
                mine -= tiles
                q_state = release(queries, q_state)

    @cute.jit
    def epilogue(self, sums, words, own_scores, own_active, word_stride, tile, quad):
        """Store a key tile's words of bits. Reduce-scatter the sums over heads across the quad, and store each lane's
        scores. tile: index of the tile of 64 keys; if it is -1, as before the first tile, store nothing."""
        upper, odd = (quad & 2) != 0, (quad & 1) != 0
        if tile >= 0:
            for block in cutlass.range_constexpr(self.words):
                (own_active + (block * word_stride + tile * WARPGROUP)).store(words[block])
            first = own_scores + ((tile >> 1) * (Q_TILE * K_TILE) + (tile & 1) * KEY_BLOCK)
            if const_expr(self.block_q == 2):
                first.store(quad_reduce_scatter(*(sums[i] for i in range(4)), upper, odd))
            else:
                for i in cutlass.range_constexpr(self.block_q // 4):
                    for half in cutlass.range_constexpr(2):
                        value = quad_reduce_scatter(*(sums[2 * (4 * i + j) + half] for j in range(4)), upper, odd)
                        (first + (4 * i * K_TILE + 8 * half)).store(value)


@cached
def compile_indexer_scores(heads: int, dim: int, config: IndexerScoresConfig):
    """-> f(q [Tq * H, D] bf16, minus_k [Tk, D] bf16, w [Tq, H] fp32, q_tiles int32 [S, 8], scores [S, N, 128, 128]
    fp32, active uint32 [S, 2 H, 2 N, 128], tile_counter int32 [1] initially 0, ctas). H: `heads`. S q tiles of 128
    queries (q_tiles.py); N key tiles of 128 keys per q tile; active: see active_bits.py. scores and active are results.
    ctas: number of persistent CTAs. Tq, Tk, S, N > 0. Rows of q and minus_k begin at multiples of 16 bytes."""
    return compile_sm90(
        IndexerScoresSm90(heads, dim, config),
        fake(BFloat16, (cute.sym_int(), dim), (dim, 1)),
        fake(BFloat16, (cute.sym_int(), dim), (cute.sym_int64(divisibility=8), 1)),
        fake(Float32, (cute.sym_int(), heads), (cute.sym_int64(), 1), 4),
        *(fake_q_tiles(), fake_tiles(Q_TILE, K_TILE), fake_active(heads), fake_tile_counter(), Int32(1), fake_stream()),
    )


def shipped_variants() -> ShippedVariants:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [(compile_indexer_scores, (*shape, config)) for shape, config in CONFIGS.items()]
