"""Gradients of the indexer's queries and weights: with g_h[t] = sum_j dI[t, j] [q_h[t] . k[j] > 0] k[j],
dq_h[t] = w[t, h] g_h[t] in bf16 and dw[t, h] = q_h[t] . g_h[t] in fp32.

dI, bf16, is the gradient of the scores of queries t for keys j (warmup_target_sm90.py).

Plan
- GEMM: M is flat (query, head) pairs, in blocks of 64 (the column blocks of q_tiles.py), N is the D channels of an
  index head, K is keys. A consumer warpgroup keeps the sums of `blocks` blocks, blocks x 64 x D, in registers. Operand
  B is the keys that the work tile sees, in shared memory, 128 per stage. All warpgroups read the same keys.
- Operand A is dI where a head is active and 0 elsewhere, computed in registers. A lane loads the words of bits of two
  adjacent keys (active_bits.py), selects the bytes of the lane's row from both words, and expands the bits to masks of
  16 bits. ldmatrix loads pairs of dI, which are the same for all heads of a query.
- While a warpgroup computes one block's operand A, the wgmma of its other block or of another warpgroup runs.
- In the prologue of a work tile each warp copies its rows of q to shared memory, for dw. In the epilogue the warp
  stages dq in the same memory. dw needs no second product, because sum_j dI relu(q . k) = q . g.
- One producer warp loads k by TMA, and dI and bits by bulk copies. In a sequence's last key tile, the keys after the
  sequence's last one belong to another sequence. The producer overwrites these keys with zeros, because 0 * NaN is NaN
  (zero_fill_pipeline.py).
- Persistent CTAs with dynamic scheduling. A work tile is the queries of all warpgroups' blocks (QTileScheduler in
  q_tiles.py).
Shared memory: per stage 128 x D x 2 bytes of k, 256 bytes of dI per query of the work tile and 1 KiB of bits per block.
Also 128 x D bytes per block for q and dq.
Registers per consumer thread: blocks x D / 2 sums, blocks x 16 for operand A and 8 or 16 for dI. A thread has 232
registers with two consumer warpgroups, or 112 with four. A producer thread has 40 or 32.
Roofline: bound by tensor cores, 256 cycles per 64 rows x 64 keys at D = 128. A warp issues 52 other instructions in
that time.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.copies import bulk_load, gather_16, tile_load
from dsa.cute.fake_tensors import fake, fake_stream
from dsa.cute.pipeline import Pipeline, expect_bytes, start
from dsa.cute.shared_memory import load_8, load_16, load_matrices, pack, store_matrices
from dsa.cute.sm90 import REGISTERS, SHARED_BYTES, WARPGROUP
from dsa.cute.tile_counter import fake_tile_counter
from dsa.cute.work_tile import WorkTilePipeline, work_tile_storage
from dsa.kernels.training.active_bits import permute
from dsa.kernels.training.fake_tensors import ShippedVariants, fake_active, fake_gradients, fake_line, fake_q_tiles
from dsa.kernels.training.global_sums import store_4
from dsa.kernels.training.limits import K_TILE
from dsa.kernels.training.mainloop import (
    K_MAJOR,
    MN_MAJOR,
    accumulator,
    add_product,
    finish_prologue,
    operand_a,
    release,
    smem_layout,
    swap_modes,
    thread_indices,
    tiled_mma,
    tma_tiles,
)
from dsa.kernels.training.q_tiles import (
    BIT_BYTES,
    COLUMN_BLOCK,
    KEY_BLOCK,
    QTileScheduler,
    WorkTileInfo,
    gradients_of,
)
from dsa.kernels.training.zero_fill_pipeline import ZeroFillPipeline, zero_fill_storage
from dsa.runtime.compile_cache import cached, compile_sm90

ROWS = 16  # (query, head) rows per warp and block


@dataclass(frozen=True)
class IndexerQueryGradConfig:
    """Configuration of a variant. warpgroups: number of consumer warpgroups. blocks: number of blocks of 64 (query,
    head) rows per warpgroup. stages: number of stages of 128 keys."""

    warpgroups: int
    blocks: int
    stages: int

    @property
    def column_blocks(self) -> int:
        return self.warpgroups * self.blocks


# The fastest measured configurations, keyed by (heads, channels). Four warpgroups are fastest if the sums fit in their
# registers, because they best hide the instructions between two wgmmas. As many stages as fit in shared memory, at most
# 8.
CONFIGS = {
    (8, 64): IndexerQueryGradConfig(4, 1, 6),
    (8, 128): IndexerQueryGradConfig(2, 2, 3),
    (16, 64): IndexerQueryGradConfig(4, 1, 7),
    (16, 128): IndexerQueryGradConfig(2, 2, 3),
    (32, 64): IndexerQueryGradConfig(4, 1, 8),
    (32, 128): IndexerQueryGradConfig(2, 2, 4),
    (64, 64): IndexerQueryGradConfig(4, 1, 8),
    (64, 128): IndexerQueryGradConfig(2, 2, 4),
}


class IndexerQueryGradSm90:
    def __init__(self, heads: int, dim: int, cfg: IndexerQueryGradConfig):
        self.heads, self.dim, self.cfg, self.blocks, self.stages = heads, dim, cfg, cfg.blocks, cfg.stages
        self.column_blocks, self.consumer_warps = cfg.column_blocks, 4 * cfg.warpgroups
        self.block_q = cfg.column_blocks * COLUMN_BLOCK // heads
        # Bytes per stage.
        self.k_bytes, self.di_bytes = K_TILE * dim * 2, self.block_q * K_TILE * 2
        self.active_bytes = cfg.column_blocks * 2 * BIT_BYTES
        self.scheduler = QTileScheduler(self.block_q)
        self.chunks = dim // 8  # chunks of 16 bytes per row of q
        self.staged = ROWS * dim * 2  # bytes of a warp's rows of q per block

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        w: cute.Tensor,
        q_tiles: cute.Tensor,
        di: cute.Tensor,
        active: cute.Tensor,
        dq: cute.Tensor,
        dw: cute.Tensor,
        tile_counter: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        k_layout = smem_layout(K_TILE, self.dim, BFloat16, self.stages)
        k_atom, k_tma = tile_load(k, k_layout, (K_TILE, self.dim))
        mma = tiled_mma(BFloat16, (COLUMN_BLOCK, self.dim), (K_MAJOR, MN_MAJOR), from_registers=True)

        @cute.struct
        class Storage:
            k_pipeline: zero_fill_storage(self.stages)
            work_tiles: work_tile_storage(WorkTileInfo)
            di: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.di_bytes], 128]
            active: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.active_bytes], 128]
            q: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, 4 * self.column_blocks * self.staged], 128]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(k_layout)], 1024]

        assert Storage.size_in_bytes() <= SHARED_BYTES
        self.storage = Storage
        threads = (self.cfg.warpgroups + 1) * WARPGROUP
        self.kernel(q, k_atom, k_tma, w, q_tiles, di, active, dq, dw, tile_counter, mma, k_layout).launch(
            grid=(ctas, 1, 1), block=(threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        q: cute.Tensor,
        k_atom: cute.CopyAtom,
        mk: cute.Tensor,
        w: cute.Tensor,
        q_tiles: cute.Tensor,
        di: cute.Tensor,
        active: cute.Tensor,
        dq: cute.Tensor,
        dw: cute.Tensor,
        tile_counter: cute.Tensor,
        mma: cute.TiledMma,
        k_layout: cute.ComposedLayout,
    ):
        tid, warp, lane = thread_indices()
        storage = SmemAllocator().allocate(self.storage)
        keys = ZeroFillPipeline.of(storage.k_pipeline, self.stages)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        starts = storage.k.data_ptr(), storage.di.data_ptr(), storage.active.data_ptr()
        work_tiles = WorkTilePipeline.of(storage.work_tiles, WorkTileInfo)
        if warp == self.consumer_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(k_atom)
        if tid == 0:
            keys.init(self.consumer_warps)
            work_tiles.init(self.consumer_warps)
        finish_prologue()

        consumer_registers, other_registers = REGISTERS[self.cfg.warpgroups]
        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(other_registers)
            if warp == self.consumer_warps:
                self.produce(k_atom, mk, q_tiles, tile_counter, work_tiles, di, active, sk, *starts, keys, lane)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            staged = storage.q.data_ptr() + warp * (self.blocks * self.staged)
            self.consume(q, w, dq, dw, mma, work_tiles, sk, *starts[1:], staged, keys.ring, tid, warp, lane)

    @cute.jit
    def produce(
        self,
        k_atom,
        mk,
        q_tiles,
        tile_counter,
        work_tiles: WorkTilePipeline,
        di,
        active,
        sk,
        k_start,
        di_start,
        active_start,
        keys: ZeroFillPipeline,
        lane,
    ):
        state, work_state, landed_phase = start(), start(), Int32(0)
        number = Int32(0)
        while number >= 0:
            number, q_tile, row, work_state = self.scheduler.advance(
                work_tiles, tile_counter, q_tiles, work_state, lane
            )
            if number >= 0:
                first = row * self.heads // COLUMN_BLOCK
                tks, tkg = tma_tiles(k_atom, sk, mk, (K_TILE, self.dim), (q_tile.first_k, 0), (None, 0))
                for tile in cutlass.range(cute.ceil_div(q_tile.visible_to(row, self.block_q), K_TILE), unroll=1):
                    valid = cutlass.min(q_tile.keys - tile * K_TILE, K_TILE)
                    keys.ring.producer_wait(state)
                    barrier = keys.copy_barrier(state, valid == K_TILE)
                    with cute.arch.elect_one():
                        expect_bytes(barrier, self.k_bytes + self.di_bytes + self.active_bytes)
                        source = gradients_of(di, number, tile, row)
                        bulk_load(di_start + state.stage * self.di_bytes, source, Int32(self.di_bytes), barrier)
                        for i in cutlass.range_constexpr(self.column_blocks):
                            source = active[number, first + i, 2 * tile, None].iterator
                            target = active_start + (state.stage * self.active_bytes + i * (2 * BIT_BYTES))
                            bulk_load(target, source, Int32(2 * BIT_BYTES), barrier)
                    cute.copy(k_atom, tkg[None, tile], tks[None, state.stage], tma_bar_ptr=barrier)
                    if valid < K_TILE:
                        k_tile = Int32(k_start.toint()) + state.stage * self.k_bytes
                        landed_phase = keys.zero_rows(landed_phase, k_tile, valid, K_TILE, self.dim * 2, lane)
                        keys.commit(state)
                    state = keys.ring.advance(state)

    @cute.jit
    def consume(
        self,
        q,
        w,
        dq,
        dw,
        mma,
        work_tiles: WorkTilePipeline,
        sk,
        di_start,
        active_start,
        staged,
        keys: Pipeline,
        tid,
        warp,
        lane,
    ):
        thr = mma.get_slice(tid % WARPGROUP)
        rb = mma.make_fragment_B(thr.partition_B(swap_modes(sk)))
        operands, words = zip(*(operand_a(thr, (COLUMN_BLOCK, KEY_BLOCK), BFloat16) for _ in range(self.blocks)))
        accs, flats = zip(*(accumulator(thr, (COLUMN_BLOCK, self.dim)) for _ in range(self.blocks)))
        weights = cute.make_rmem_tensor((2 * self.blocks,), Float32)
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        own_warp, side = warp % 4, warp // 4
        # This warp's first row in the work tile, in the warpgroup's first block.
        own = side * (self.blocks * COLUMN_BLOCK) + own_warp * ROWS
        di_at = Int32(di_start.toint()) + own // self.heads * (K_TILE * 2) + (lane >> 3) * 16
        word_at = Int32(active_start.toint()) + side * (self.blocks * 2 * BIT_BYTES)
        word_at += (lane & 3) * 32 + (lane >> 3) * 8
        # The permutation `taken` selects, from the words of two keys, the bytes with the bits of this lane's rows. The
        # shift moves the bits of the warp's 16 rows to the top of each byte.
        taken = Uint32(0x6420) + Uint32(0x1111) * Uint32((lane >> 2) & 1)
        shift = Uint32(2 * own_warp)
        state, work_state = start(), start()
        number = Int32(0)
        while number >= 0:
            work_tile = work_tiles.current(work_state)
            work_state = work_tiles.release(work_state)
            number = work_tile.q_tile
            if number >= 0:
                flat_row = (work_tile.first_q + work_tile.row) * self.heads + own
                end = (work_tile.first_q + work_tile.rows) * self.heads
                self.load_q(q, flat_row, end, staged, lane)
                for i in cutlass.range_constexpr(2 * self.blocks):
                    weights[i] = w[cutlass.min(flat_row + i // 2 * COLUMN_BLOCK + i % 2 * 8 + (lane >> 2), end - 1)]
                for acc in flats:
                    acc.fill(0.0)
                visible = work_tile.visible
                for tile in cutlass.range(cute.ceil_div(visible, K_TILE), unroll=1):
                    keys.consumer_wait(state)
                    for b in cutlass.range_constexpr(2):
                        if tile * K_TILE + b * KEY_BLOCK < visible:
                            di_here = di_at + (state.stage * self.di_bytes + b * 128)
                            word_here = word_at + (state.stage * self.active_bytes + b * BIT_BYTES)
                            self.add(mma, accs, operands, words, rb, state.stage, b, di_here, word_here, taken, shift)
                    state = release(keys, state)
                cute.arch.cp_async_wait_group(0)
                cute.arch.sync_warp()
                self.epilogue(flats, weights, dq, dw, flat_row, end, staged, lane)

    @cute.jit
    def add(self, mma, accs, operands, words, rb, stage, b: cutlass.Constexpr, di_here, word_here, taken, shift):
        """Add the products of half b of a stage, 64 keys, to the sums of this warpgroup's blocks."""
        halves = 2 if self.heads < 16 else 1
        for i in cutlass.range_constexpr(self.blocks):
            own = words[i]
            pairs = []
            for half in cutlass.range_constexpr(halves):
                # The eight row addresses of an ldmatrix matrix are equal, so lane l gets pair l % 4 of the 8 numbers at
                # this address.
                address = di_here + (i * COLUMN_BLOCK + 8 * half) // self.heads * (K_TILE * 2)
                pairs.append([*load_matrices(address), *load_matrices(address + 64)])
            for step in cutlass.range_constexpr(KEY_BLOCK // 16):
                low, high = load_8(word_here + (i * 2 * BIT_BYTES + step * 128))
                upper = permute(low, high, taken) << shift
                of_rows = [upper, upper << 1]
                for half in cutlass.range_constexpr(2):
                    for eight in cutlass.range_constexpr(2):
                        mask = permute(of_rows[half], of_rows[half], 0xBB99 if eight else 0xAA88)
                        own[4 * step + 2 * eight + half] = pairs[half % halves][2 * step + eight] & mask
            add_product(mma, accs[i], operands[i], rb, stage, first=b * (KEY_BLOCK // 16))
        cute.nvgpu.warpgroup.wait_group(0)

    @cute.jit
    def staged_offset(self, row, chunk):
        """Return the byte offset of 16-byte chunk `chunk` of row `row` in the 16 rows that a warp stages per block. The
        swizzle puts the same chunk of eight adjacent rows into different banks."""
        return row * (self.dim * 2) + (chunk ^ (row & 7)) * 16

    @cute.jit
    def lane_offset(self, first: cutlass.Constexpr, lane):
        """Return the byte offset of chunk number `first` + `lane`, counted through the 16 rows, row by row."""
        return self.staged_offset(first // self.chunks + lane // self.chunks, lane % self.chunks)

    @cute.jit
    def load_q(self, q, flat_row, end, staged, lane):
        """Start loading this warp's rows of q to shared memory, with zeros for rows from `end` on. In a block a warp
        has 16 rows: 16 heads of one query, or with 8 heads the heads of two queries. flat_row, end: rows of q [Tq * H,
        D]."""
        source = Int64(q[flat_row, None].iterator.toint()) + lane * 16
        for i in cutlass.range_constexpr(self.blocks):
            for first in cutlass.range_constexpr(0, ROWS * self.chunks, 32):
                row = flat_row + i * COLUMN_BLOCK
                if const_expr(self.heads < ROWS):
                    row += first // self.chunks + lane // self.chunks
                target = Int32(staged.toint()) + (i * self.staged + self.lane_offset(first, lane))
                gather_16(target, source + (i * COLUMN_BLOCK * self.dim * 2 + first * 16), row < end)
        cute.arch.cp_async_commit_group()

    @cute.jit
    def epilogue(self, flats, weights, dq, dw, flat_row, end, staged, lane):
        for i in cutlass.range_constexpr(self.blocks):
            if flat_row + i * COLUMN_BLOCK < end:
                self.store_block(flats[i], weights, dq, dw, i, flat_row, end, staged, lane)

    @cute.jit
    def store_block(self, flat, weights, dq, dw, i: cutlass.Constexpr, flat_row, end, staged, lane):
        memory = Int32(staged.toint()) + i * self.staged
        sums = [Float32(0.0), Float32(0.0)]
        for n in cutlass.range_constexpr(self.dim // 16):
            address = memory + self.staged_offset(lane & 15, 2 * n + (lane >> 4))
            loaded = load_matrices(address)
            results = []
            for m in cutlass.range_constexpr(4):
                half, at = m % 2, 4 * (2 * n + m // 2) + 2 * (m % 2)
                low, high = (loaded[m] << 16).bitcast(Float32), (loaded[m] & Uint32(0xFFFF0000)).bitcast(Float32)
                sums[half] = cute.math.fma(low, flat[at], sums[half])
                sums[half] = cute.math.fma(high, flat[at + 1], sums[half])
                weight = weights[2 * i + half]
                results.append(pack(flat[at] * weight, flat[at + 1] * weight, BFloat16))
            store_matrices(address, results)
        cute.arch.sync_warp()
        target = dq[flat_row, None].iterator + lane * 8
        for first in cutlass.range_constexpr(0, ROWS * self.chunks, 32):
            vector = load_16(memory + self.lane_offset(first, lane))
            address = Int64((target + (i * COLUMN_BLOCK * self.dim + first * 8)).toint())
            if const_expr(self.heads >= ROWS):
                store_4(address, vector)
            else:
                if flat_row + (i * COLUMN_BLOCK + first // self.chunks) + lane // self.chunks < end:
                    store_4(address, vector)
        for half in cutlass.range_constexpr(2):
            total = sums[half] + cute.arch.shuffle_sync_bfly(sums[half], offset=1)
            total += cute.arch.shuffle_sync_bfly(total, offset=2)
            row = flat_row + (i * COLUMN_BLOCK + 8 * half) + (lane >> 2)
            if (lane & 3) == 0 and row < end:
                dw[row] = total
        cute.arch.sync_warp()


@cached
def compile_indexer_query_grad(heads: int, dim: int, config: IndexerQueryGradConfig):
    """-> f(q [Tq * H, D] bf16, k [Tk, D] bf16, w [Tq * H] fp32, q_tiles [S, 8] int32, di bf16 [S, N, 2, 64, 128],
    active uint32 [S, 2 H, 2 N, 128], dq [Tq * H, D] bf16, dw [Tq * H] fp32, tile_counter int32 [1] initially 0, ctas).
    S q tiles of 128 queries (q_tiles.py); N key tiles of 128 keys per q tile. di is the gradient of the scores, each
    128 x 128 tile as two halves of 64 query rows; active: see active_bits.py. ctas: number of persistent CTAs. dq and
    dw are results. Rows of q, k and dq begin at multiples of 16 bytes."""
    rows = cute.sym_int()
    # The strides are 64-bit, because offsets in q can exceed 32 bits.
    q, k, dq = (fake(BFloat16, (n, dim), (cute.sym_int64(divisibility=8), 1)) for n in (rows, cute.sym_int(), rows))
    w, dw = (fake_line(Float32, rows) for _ in range(2))
    return compile_sm90(
        IndexerQueryGradSm90(heads, dim, config),
        *(q, k, w, fake_q_tiles(), fake_gradients(), fake_active(heads), dq, dw, fake_tile_counter(), Int32(1)),
        fake_stream(),
    )


def shipped_variants() -> ShippedVariants:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [(compile_indexer_query_grad, (*shape, config)) for shape, config in CONFIGS.items()]
