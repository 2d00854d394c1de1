"""Gradient of the indexer's keys: dk[j] += sum_{t,h} dI[t, j] [q_h[t] . k[j] > 0] w[t, h] q_h[t], fp32, deterministic.

dI, bf16, is the gradient of the scores of queries t for keys j (warmup_target_sm90.py). h runs over the index heads.

Plan
- GEMM: M is keys, N is the D channels of an index head, K is the flat (query, head) columns, 64 per stage. A consumer
  warpgroup keeps the sums of 128 keys, two tiles of 64 x D, in registers. Operand B is the queries in shared memory.
  All warpgroups read the same queries.
- Operand A is dI w where a head is active and 0 elsewhere, computed in registers. indexer_scores_sm90.py stores each
  word of active bits in the accumulator layout (active_bits.py), so a lane loads only the bits of the lane's elements.
  A transposing ldmatrix loads dI, with each number in both halves of a word. The lane multiplies the word by two
  weights and rounds the products to bf16. Then it masks the two products by a shift of the bits, a byte permutation
  that replicates sign bits, and an AND.
- While a warpgroup computes one tile's operand A, the wgmma of its other tile or of another warpgroup runs.
- Stream-K (key_block_scheduler.py): all (key block, column block) pairs are one list, and each CTA gets an equal range
  of it. If all pairs of a key block are in the range of one CTA, this CTA adds its sums to dk directly. If several CTAs
  share a key block, each of them writes partial sums, and a second kernel, the fixup, adds these to dk in a fixed
  order.
- One producer warp loads q by TMA, and w, dI and bits by bulk copies. In a sequence's last column block, the columns
  after the sequence's last one belong to another sequence. The producer overwrites q and w of these columns with zeros,
  because 0 * NaN is NaN (zero_fill_pipeline.py).
Shared memory per stage: 64 x D x 2 bytes of q, 128 bytes of w, 256 bytes of dI per query and warpgroup, 1 KiB of bits
per warpgroup.
Registers per consumer thread: D accumulators, 32 for operand A, 8 for w, 4 to 16 for dI. A thread has 232 registers
with two consumer warpgroups, or 160 with three.
Roofline: bound by tensor cores, 256 cycles per 64 keys x 64 columns at D = 128. A warp issues 62 other instructions in
this time.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.copies import bulk_load, tile_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream
from dsa.cute.pipeline import Pipeline, expect_bytes, start
from dsa.cute.shared_memory import load_4, load_matrices, load_matrices_transposed, store_4
from dsa.cute.sm90 import REGISTERS, SHARED_BYTES, WARP, WARPGROUP
from dsa.kernels.training.active_bits import multiply_pairs, permute, word_place
from dsa.kernels.training.fake_tensors import ShippedVariants, fake_active, fake_gradients, fake_q_tiles
from dsa.kernels.training.key_block_scheduler import KeyBlockScheduler
from dsa.kernels.training.limits import MAX_Q_TILES
from dsa.kernels.training.mainloop import (
    K_MAJOR,
    MN_MAJOR,
    accumulator,
    add_product,
    operand_a,
    release,
    smem_layout,
    swap_modes,
    tiled_mma,
    tma_tiles,
)
from dsa.kernels.training.q_tiles import BIT_BYTES, COLUMN_BLOCK, KEY_BLOCK, gradients_of
from dsa.kernels.training.zero_fill_pipeline import ZeroFillPipeline, zero_fill_storage
from dsa.runtime.compile_cache import cached, compile_sm90

TILE = 2 * KEY_BLOCK  # keys per consumer warpgroup
FIXUP_THREADS = 256


# Words of a CTA's row of `fixup`, which describe the CTA's partial sums. The head is the key block in which the CTA's
# range begins, and the tail is the key block in which the range ends. Other CTAs can have pairs of both.
# TAIL: 1 if the CTA's range has the tail's first pair but not the tail's last pair. Then partial_sums[cta, 1] is valid.
# TAIL_KEY, TAIL_KEYS: the first key and the number of keys of the tail.
# HEAD: 1 if another CTA has the first pair of the head. Then partial_sums[cta, 0] is valid.
# HEAD_ENDS: 1 if HEAD is 1 and the CTA's range has the last pair of the head.
TAIL, TAIL_KEY, TAIL_KEYS, HEAD, HEAD_ENDS = range(5)
FIXUP_WORDS = 8


@dataclass(frozen=True)
class IndexerKeyGradConfig:
    """Configuration of a variant. warpgroups: number of consumer warpgroups. stages: number of stages of 64 (query,
    head) columns."""

    warpgroups: int
    stages: int

    @property
    def keys(self) -> int:
        return TILE * self.warpgroups


# Keyed by (heads, channels). With 128 channels the sums need 232 registers per thread, so there are two consumer
# warpgroups. As many stages as fit in shared memory, at most 12.
CONFIGS = {
    (8, 64): IndexerKeyGradConfig(3, 12),
    (8, 128): IndexerKeyGradConfig(2, 9),
    (16, 64): IndexerKeyGradConfig(3, 12),
    (16, 128): IndexerKeyGradConfig(2, 10),
    (32, 64): IndexerKeyGradConfig(2, 12),
    (32, 128): IndexerKeyGradConfig(2, 11),
    (64, 64): IndexerKeyGradConfig(2, 12),
    (64, 128): IndexerKeyGradConfig(2, 11),
}


class IndexerKeyGradSm90:
    def __init__(self, heads: int, dim: int, cfg: IndexerKeyGradConfig):
        self.heads, self.dim, self.warpgroups, self.stages, self.keys = heads, dim, cfg.warpgroups, cfg.stages, cfg.keys
        self.threads, self.consumer_warps = (cfg.warpgroups + 1) * WARPGROUP, 4 * cfg.warpgroups
        self.queries = COLUMN_BLOCK // heads  # queries per column block
        self.tile_bytes = self.queries * TILE * 2  # bytes of dI per warpgroup and stage
        # Bytes per stage.
        self.q_bytes, self.w_bytes = COLUMN_BLOCK * dim * 2, COLUMN_BLOCK * 2
        self.di_bytes, self.active_bytes = cfg.warpgroups * self.tile_bytes, cfg.warpgroups * 2 * BIT_BYTES
        self.scheduler = KeyBlockScheduler(heads, cfg.keys)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        w: cute.Tensor,
        q_tiles: cute.Tensor,
        di: cute.Tensor,
        active: cute.Tensor,
        dk: cute.Tensor,
        partial_sums: cute.Tensor,
        fixup: cute.Tensor,
        stream,
    ):
        q_layout = smem_layout(COLUMN_BLOCK, self.dim, BFloat16, self.stages)
        q_atom, q_tma = tile_load(q, q_layout, (COLUMN_BLOCK, self.dim))
        mma = tiled_mma(BFloat16, (KEY_BLOCK, self.dim), (K_MAJOR, MN_MAJOR), from_registers=True)

        @cute.struct
        class Storage:
            column_pipeline: zero_fill_storage(self.stages)
            sums: cute.struct.MemRange[Int32, WARP]
            found: cute.struct.MemRange[Int32, 4]
            before: cute.struct.MemRange[Int32, MAX_Q_TILES]
            w: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.w_bytes], 128]
            di: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.di_bytes], 128]
            active: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.active_bytes], 128]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]

        assert Storage.size_in_bytes() <= SHARED_BYTES
        self.storage = Storage
        ctas = fixup.shape[0]
        self.kernel(q_atom, q_tma, w, q_tiles, di, active, dk, partial_sums, fixup, mma, q_layout).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1, use_pdl=True
        )
        self.add_partial_sums(dk, partial_sums, fixup).launch(
            grid=(ctas, self.keys * self.dim // (4 * FIXUP_THREADS), 1),
            block=(FIXUP_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        mq: cute.Tensor,
        w: cute.Tensor,
        q_tiles: cute.Tensor,
        di: cute.Tensor,
        active: cute.Tensor,
        dk: cute.Tensor,
        partial_sums: cute.Tensor,
        fixup: cute.Tensor,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        columns = ZeroFillPipeline.of(storage.column_pipeline, self.stages)
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        starts = storage.q.data_ptr(), storage.w.data_ptr(), storage.di.data_ptr(), storage.active.data_ptr()
        sums = storage.sums.get_tensor(cute.make_layout(WARP))
        if warp == self.consumer_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(q_atom)
        if tid == 0:
            columns.init(self.consumer_warps)
        cute.arch.mbarrier_init_fence()
        if tid < WARP:
            sums[tid] = 0
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()
        own = self.scheduler.cta_range(
            *(q_tiles, storage.before.get_tensor(cute.make_layout(MAX_Q_TILES)), sums),
            *(storage.found.get_tensor(cute.make_layout(4)), cta, fixup.shape[0], tid, self.threads, warp, lane),
        )

        consumer_registers, other_registers = REGISTERS[self.warpgroups]
        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(other_registers)
            if warp == self.consumer_warps:
                self.produce(q_atom, mq, w, q_tiles, di, active, sq, *starts, columns, own, lane)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            self.consume(
                *(q_tiles, dk, partial_sums, fixup, mma, sq, *starts[1:], columns.ring, own, cta, tid, warp, lane)
            )

    @cute.jit
    def tiles_seen(self, span, key_block, column_block):
        """Return how many of the key block's tiles of 128 keys the column block sees. The column block is one of `span`
        (key_block_scheduler.py), and sees a tile if it sees the tile's first key."""
        count = Int32(0)
        for tile in cutlass.range_constexpr(self.warpgroups):
            key = key_block * self.keys + tile * TILE
            if column_block >= self.scheduler.first_column_block(span.q_tile, key) and key < span.visible:
                count += 1
        return count

    @cute.jit
    def produce(
        self,
        q_atom,
        mq,
        w,
        q_tiles,
        di,
        active,
        sq,
        q_start,
        w_start,
        di_start,
        active_start,
        columns: ZeroFillPipeline,
        own,
        lane,
    ):
        state, landed_phase = start(), Int32(0)
        next_tile = self.scheduler.first(q_tiles, own, lane)
        while next_tile.is_valid:
            work_tile = self.scheduler.work_tile(q_tiles, next_tile, lane)
            span, key_block, column_block, end = work_tile
            flat = span.q_tile.first_q * self.heads
            tqs, tqg = tma_tiles(q_atom, sq, mq, (COLUMN_BLOCK, self.dim), (flat, 0), (None, 0))
            for at in cutlass.range(column_block, end, unroll=1):
                q_tile = span.first + at // self.scheduler.column_blocks_a_q_tile
                own_block = at % self.scheduler.column_blocks_a_q_tile
                tiles = self.tiles_seen(span, key_block, at)
                valid = cutlass.min(span.columns - at * COLUMN_BLOCK, COLUMN_BLOCK)  # columns of this sequence
                columns.ring.producer_wait(state)
                barrier = columns.copy_barrier(state, valid == COLUMN_BLOCK)
                with cute.arch.elect_one():
                    weights = cutlass.min(w.shape[0] - (flat + at * COLUMN_BLOCK), COLUMN_BLOCK) * 2
                    expect_bytes(barrier, self.q_bytes + weights + tiles * self.tile_bytes + tiles * (2 * BIT_BYTES))
                    own_w = w.iterator + Int64(flat + at * COLUMN_BLOCK)
                    bulk_load(w_start + state.stage * self.w_bytes, own_w, weights, barrier)
                    for tile in cutlass.range_constexpr(self.warpgroups):
                        if tile < tiles:
                            source = gradients_of(
                                di, q_tile, key_block * self.warpgroups + tile, own_block * self.queries
                            )
                            target = di_start + (state.stage * self.di_bytes + tile * self.tile_bytes)
                            bulk_load(target, source, Int32(self.tile_bytes), barrier)
                    if tiles > 0:
                        source = active[q_tile, own_block, key_block * (2 * self.warpgroups), None].iterator
                        target = active_start + state.stage * self.active_bytes
                        bulk_load(target, source, tiles * (2 * BIT_BYTES), barrier)
                cute.copy(q_atom, tqg[None, at], tqs[None, state.stage], tma_bar_ptr=barrier)
                if valid < COLUMN_BLOCK:
                    q_block = Int32(q_start.toint()) + state.stage * self.q_bytes
                    landed_phase = columns.zero_rows(landed_phase, q_block, valid, COLUMN_BLOCK, self.dim * 2, lane)
                    for column in cutlass.range(valid + 2 * lane, COLUMN_BLOCK, 64, unroll=1):
                        store_4(Int32(w_start.toint()) + state.stage * self.w_bytes + 2 * column, Uint32(0))
                    columns.commit(state)
                state = columns.ring.advance(state)
            next_tile = self.scheduler.advance(q_tiles, next_tile, work_tile)

    @cute.jit
    def consume(
        self,
        q_tiles,
        dk,
        partial_sums,
        fixup,
        mma,
        sq,
        w_start,
        di_start,
        active_start,
        columns: Pipeline,
        own,
        cta,
        tid,
        warp,
        lane,
    ):
        thr = mma.get_slice(tid % WARPGROUP)
        rb = mma.make_fragment_B(thr.partition_B(swap_modes(sq)))
        operands, words = zip(*(operand_a(thr, (KEY_BLOCK, COLUMN_BLOCK), BFloat16) for _ in range(2)))
        accs, flats = zip(*(accumulator(thr, (KEY_BLOCK, self.dim)) for _ in range(2)))
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        tile = warp // 4
        # Each lane gives ldmatrix the address of a row of matrix lane / 8. For w, the four matrices are 8 columns each.
        # For dI, bit 3 of the lane selects 8 of the warp's 16 keys. Bit 4 selects one of two queries. If a column block
        # is one query, bit 4 selects one of the two tiles of 64 keys.
        own_warp = warp % 4
        w_at = Int32(w_start.toint()) + (lane >> 3) * 16
        di_at = Int32(di_start.toint()) + tile * self.tile_bytes + own_warp * 32 + ((lane >> 3) & 1) * 16
        di_at += (lane >> 4) * (128 if self.queries == 1 else TILE * 2)
        active_at = Int32(active_start.toint()) + tile * (2 * BIT_BYTES) + own_warp * 128 + word_place(lane) * 4
        if tid == 0:
            for i in cutlass.range_constexpr(FIXUP_WORDS):
                fixup[cta, i] = 0
        state = start()
        next_tile = self.scheduler.first(q_tiles, own, lane)
        while next_tile.is_valid:
            work_tile = self.scheduler.work_tile(q_tiles, next_tile, lane)
            span, key_block, column_block, end = work_tile
            for acc in flats:
                acc.fill(0.0)
            key = key_block * self.keys + tile * TILE
            seen_from, both_from = self.seen_from(span, key, end), self.seen_from(span, key + KEY_BLOCK, end)
            for at in cutlass.range(column_block, end, unroll=1):
                columns.consumer_wait(state)
                if at >= both_from:
                    self.add(2, mma, accs, operands, words, rb, state.stage, w_at, di_at, active_at)
                elif at >= seen_from:
                    self.add(1, mma, accs, operands, words, rb, state.stage, w_at, di_at, active_at)
                state = release(columns, state)
            if end > column_block:
                began = column_block == self.scheduler.first_column_block(span.q_tile, key_block * self.keys)
                ended = end == span.column_blocks
                row = own_warp * 16 + (lane >> 2)
                if began and ended:
                    for b in cutlass.range_constexpr(2):
                        for half in cutlass.range_constexpr(2):
                            own_key = key + b * KEY_BLOCK + row + 8 * half
                            if own_key < span.q_tile.keys:
                                self.store(flats[b], half, dk[span.q_tile.first_k + own_key, None], True, lane)
                else:
                    which = Int32(1) if began else Int32(0)
                    for b in cutlass.range_constexpr(2):
                        for half in cutlass.range_constexpr(2):
                            own_key = tile * TILE + b * KEY_BLOCK + row + 8 * half
                            self.store(flats[b], half, partial_sums[cta, which, own_key, None], False, lane)
                    if tid == 0:
                        if began:
                            fixup[cta, TAIL] = 1
                            fixup[cta, TAIL_KEY] = span.q_tile.first_k + key
                            fixup[cta, TAIL_KEYS] = cutlass.min(span.q_tile.keys - key, self.keys)
                        else:
                            fixup[cta, HEAD] = 1
                            fixup[cta, HEAD_ENDS] = Int32(1) if ended else Int32(0)
            next_tile = self.scheduler.advance(q_tiles, next_tile, work_tile)

    @cute.jit
    def seen_from(self, span, key, end):
        """Return the first column block that sees a key, or `end` if no column block does."""
        return self.scheduler.first_column_block(span.q_tile, key) if key < span.visible else end

    @cute.jit
    def add(self, blocks: cutlass.Constexpr, mma, accs, operands, words, rb, stage, w_at, di_at, active_at):
        """Add the products of a stage's columns to the sums of the warpgroup's first `blocks` (1 or 2) tiles of 64
        keys."""
        w_here, di_here = w_at + stage * self.w_bytes, di_at + stage * self.di_bytes
        word_here = active_at + stage * self.active_bytes
        # The eight row addresses of an ldmatrix matrix are equal. So for w, lane l gets pair l % 4 of the 8 numbers at
        # this address. For dI, the load transposes the matrix, so lane l gets number l / 4 twice.
        w = [*load_matrices(w_here), *load_matrices(w_here + 64)]
        if const_expr(self.queries == 1):
            doubled = load_matrices_transposed(di_here)
        for b in cutlass.range_constexpr(blocks):
            word = load_4(word_here + b * BIT_BYTES)
            own = words[b]
            for query in cutlass.range_constexpr(self.queries):
                if const_expr(self.queries > 1 and query % 2 == 0):
                    pairs = load_matrices_transposed(di_here + (b * 128 + query * (TILE * 2)))
                for i in cutlass.range_constexpr(8 // self.queries):
                    j = query * (8 // self.queries) + i
                    shifted = word << j
                    for half in cutlass.range_constexpr(2):
                        if const_expr(self.queries == 1):
                            number = doubled[2 * b + half]
                        else:
                            number = pairs[2 * (query % 2) + half]
                        mask = permute(shifted, shifted, 0xBBAA if half else 0x9988)
                        own[2 * j + half] = multiply_pairs(number, w[j]) & mask
            add_product(mma, accs[b], operands[b], rb, stage)
        cute.nvgpu.warpgroup.wait_group(0)

    @cute.jit
    def store(self, flat, half: cutlass.Constexpr, row, add: cutlass.Constexpr, lane):
        """Store the lane's sums of one key to `row`, or add them to `row` if `add`. The lane has a pair of adjacent
        channels in every 8 channels. half: which of the lane's two keys in the tile of 64 keys, r (0) or r + 8 (1)."""
        pairs = cute.local_tile(row, (2,), (None,))
        pair = cute.make_rmem_tensor((2,), Float32)
        for j in cutlass.range_constexpr(self.dim // 8):
            target = pairs[None, 4 * j + (lane & 3)]
            if const_expr(add):
                cute.autovec_copy(target, pair)
                pair[0] += flat[4 * j + 2 * half]
                pair[1] += flat[4 * j + 2 * half + 1]
            else:
                pair[0], pair[1] = flat[4 * j + 2 * half], flat[4 * j + 2 * half + 1]
            cute.autovec_copy(pair, target)

    @cute.kernel
    def add_partial_sums(self, dk: cute.Tensor, partial_sums: cute.Tensor, fixup: cute.Tensor):
        """Add the partial sums to dk (the fixup). If CTA x of the first kernel has TAIL = 1, the CTAs (x, y) handle
        that tail: y selects 4 * FIXUP_THREADS of the tail's numbers. They add up the partial sums of CTA x and of the
        following CTAs, up to the end of the key block. They add the total to dk."""
        tid, _, _ = cute.arch.thread_idx()
        cta, part, _ = cute.arch.block_idx()
        index = part * FIXUP_THREADS + tid
        row, vector = index // (self.dim // 4), index % (self.dim // 4)
        wait_for_prerequisite_grids()
        if fixup[cta, TAIL] == 1 and row < fixup[cta, TAIL_KEYS]:
            target = cute.local_tile(dk[fixup[cta, TAIL_KEY] + row, None], (4,), (vector,))
            total, more = cute.make_rmem_tensor((4,), Float32), cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(cute.local_tile(partial_sums[cta, 1, row, None], (4,), (vector,)), total)
            other, ends = cta + 1, Int32(0)
            while ends == 0 and other < fixup.shape[0]:
                cute.autovec_copy(cute.local_tile(partial_sums[other, 0, row, None], (4,), (vector,)), more)
                for i in cutlass.range_constexpr(4):
                    total[i] += more[i]
                ends = fixup[other, HEAD_ENDS]
                other += 1
            cute.autovec_copy(target, more)
            for i in cutlass.range_constexpr(4):
                more[i] += total[i]
            cute.autovec_copy(more, target)


@cached
def compile_indexer_key_grad(heads: int, dim: int, config: IndexerKeyGradConfig):
    """-> f(q [Tq * H, D] bf16, w [Tq * H] bf16, q_tiles int32 [S, 8], di bf16 [S, N, 2, 64, 128],
    active uint32 [S, 2 H, 2 N, 128], dk [Tk, D] fp32, partial_sums [ctas, 2, keys, D] fp32, fixup int32 [ctas, 8]).
    S q tiles of 128 queries (q_tiles.py), at most 1024; N key tiles of 128 keys per q tile. di is the gradient of the
    scores, each 128 x 128 tile as two halves of 64 query rows; active: see active_bits.py. The kernels add to dk. keys:
    `config.keys`; ctas: number of persistent CTAs. partial_sums and fixup are scratch. Rows of q begin at multiples of
    16 bytes."""
    ctas, block = cute.sym_int(), config.keys * dim
    return compile_sm90(
        IndexerKeyGradSm90(heads, dim, config),
        fake(BFloat16, (cute.sym_int(), dim), (dim, 1)),
        fake(BFloat16, (cute.sym_int(),), (1,)),
        *(fake_q_tiles(), fake_gradients(), fake_active(heads)),
        fake(Float32, (cute.sym_int(), dim), (cute.sym_int64(divisibility=4), 1)),
        fake(Float32, (ctas, 2, config.keys, dim), (2 * block, block, dim, 1)),
        fake(Int32, (ctas, FIXUP_WORDS), (FIXUP_WORDS, 1)),
        fake_stream(),
    )


def shipped_variants() -> ShippedVariants:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [(compile_indexer_key_grad, (*shape, config)) for shape, config in CONFIGS.items()]
