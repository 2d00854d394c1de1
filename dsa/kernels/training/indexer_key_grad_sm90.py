"""Gradient of the indexer's keys: dk[j] += sum_{t,h} dI[t, j] [q_h[t] . k[j] > 0] w[t, h] q_h[t], fp32, deterministic.

Plan
- Keys are the rows of a product whose inner dimension are the flat (query, head) columns, 64 at a time. A math
  warpgroup has the sums of 128 keys, two tiles of 64 x D, in registers; the queries pass by through shared memory, read
  by all warpgroups as the operand B, with the channels as columns.
- The operand A, dI w where a head is active, is made in registers. The bits of q . k are stored as the very lane that
  needs them has had them (indexer_bits.py); a shift, a byte permutation that spreads signs and an AND make two
  numbers of 16 bits; dI comes by a transposing ldmatrix, twice in a word; products with w round to bf16.
- While a warpgroup makes one tile's operand, its other tile's wgmma runs, or another warpgroup's.
- CTAs have even shares of all (block of keys, group of columns) pairs (indexer_runs.py). A block that one CTA
  has alone it adds to dk; of the others there are partial sums, which a second kernel adds in a fixed order.
- One warp loads: q by TMA; w, dI and bits by bulk copies. Columns behind a run's last are of queries of another
  sequence: they are overwritten by zeros, as 0 * NaN would be NaN.
Shared memory: STAGES of 64 x D x 2 bytes of q, 128 of w, 256 a query and warpgroup of dI, 1 KiB a warpgroup of bits.
Registers: D accumulators, 32 of operands, 8 of w, 4 to 16 of dI, of 232 with two warpgroups,
160 with three, at D 64.
Roofline: tensor cores, 256 clocks for 64 keys x 64 columns at D 128; beside them 62 instructions of a warp.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.copies import bulk_load
from dsa.cute.pipeline import advance
from dsa.cute.score_tile import REGISTERS, SHARED_BYTES, WARPGROUP, init_ring, tile_load
from dsa.cute.shared_memory import load_4, store_4
from dsa.kernels.training.indexer_bits import permute, word_place
from dsa.kernels.training.indexer_runs import MOST_SLOTS, RunWalk
from dsa.kernels.training.indexer_slots import BLOCK, GROUP, SLOT_ROWS, fake_gradients, fake_slots, gradients_of
from dsa.kernels.training.masked_operands import load_doubled, load_pairs, multiply_pairs

TILE = 2 * BLOCK  # keys of a warpgroup
WORDS = 4 * WARPGROUP  # bytes of the bits of 64 keys x 64 columns
META = 8  # numbers about a CTA's partial sums
TAIL, TAIL_KEY, TAIL_KEYS, HEAD, HEAD_ENDS = range(5)
SUM_THREADS = 256


@dataclass(frozen=True)
class IndexerKeyGradConfig:
    """groups: math warpgroups; stages: of 64 columns."""

    groups: int
    stages: int

    @property
    def keys(self) -> int:
        return TILE * self.groups

    @property
    def threads(self) -> int:
        return (self.groups + 1) * WARPGROUP

    def stage_bytes(self, heads: int, dim: int) -> tuple[int, int, int, int]:
        """Of q, w, dI and bits."""
        return GROUP * dim * 2, GROUP * 2, self.groups * (GROUP // heads) * TILE * 2, self.groups * 2 * WORDS

    def shared(self, heads: int, dim: int) -> int:
        return self.stages * (sum(self.stage_bytes(heads, dim)) + 32) + 4 * MOST_SLOTS + 3 * 1024


class IndexerKeyGradSm90:
    def __init__(self, heads: int, dim: int, cfg: IndexerKeyGradConfig):
        self.heads, self.dim, self.groups, self.stages = heads, dim, cfg.groups, cfg.stages
        self.keys, self.threads, self.math_warps = cfg.keys, cfg.threads, 4 * cfg.groups
        self.math_registers, self.other_registers = REGISTERS[cfg.groups]
        self.q_bytes, self.w_bytes, self.di_bytes, self.word_bytes = cfg.stage_bytes(heads, dim)
        self.queries = GROUP // heads  # of a group
        self.walk = RunWalk(heads, cfg.keys)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        w: cute.Tensor,
        slots: cute.Tensor,
        di: cute.Tensor,
        active: cute.Tensor,
        dk: cute.Tensor,
        parts: cute.Tensor,
        meta: cute.Tensor,
        stream,
    ):
        q_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (BLOCK, GROUP, self.dim), BFloat16, self.stages)
        q_atom, q_tma = tile_load(q, q_layout, (GROUP, self.dim))
        mma = sm90.make_trivial_tiled_mma(
            *(BFloat16, BFloat16, cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN, Float32),
            *((1, 1, 1), (BLOCK, self.dim), cute.nvgpu.warpgroup.OperandSource.RMEM),
        )

        @cute.struct
        class Storage:
            # The last one tells the loading warp itself of what it is to change.
            full: cute.struct.MemRange[Int64, self.stages + 1]
            empty: cute.struct.MemRange[Int64, self.stages]
            sums: cute.struct.MemRange[Int32, 32]
            found: cute.struct.MemRange[Int32, 4]
            before: cute.struct.MemRange[Int32, MOST_SLOTS]
            w: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.w_bytes], 128]
            di: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.di_bytes], 128]
            words: cute.struct.Align[cute.struct.MemRange[cutlass.Uint8, self.stages * self.word_bytes], 128]
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]

        self.storage = Storage
        ctas = meta.shape[0]
        self.kernel(q_atom, q_tma, w, slots, di, active, dk, parts, meta, mma, q_layout).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1
        )
        self.add_parts(dk, parts, meta).launch(
            grid=(ctas, self.keys * self.dim // (4 * SUM_THREADS), 1), block=(SUM_THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        mq: cute.Tensor,
        w: cute.Tensor,
        slots: cute.Tensor,
        di: cute.Tensor,
        active: cute.Tensor,
        dk: cute.Tensor,
        parts: cute.Tensor,
        meta: cute.Tensor,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        memory = (storage.q.data_ptr(), storage.w.data_ptr(), storage.di.data_ptr(), storage.words.data_ptr())
        before = storage.before.get_tensor(cute.make_layout(MOST_SLOTS))
        sums = storage.sums.get_tensor(cute.make_layout(32))
        found = storage.found.get_tensor(cute.make_layout(4))
        if warp == self.math_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(q_atom)
        if tid == 0:
            init_ring(full, empty, self.stages, self.math_warps)
            cute.arch.mbarrier_init(full + self.stages, 1)
        cute.arch.mbarrier_init_fence()
        if tid < 32:
            sums[tid] = 0
        cute.arch.sync_threads()
        share = self.walk.share(slots, before, sums, found, cta, meta.shape[0], tid, self.threads, warp, lane)

        if warp >= self.math_warps:
            cute.arch.setmaxregister_decrease(self.other_registers)
            if warp == self.math_warps:
                self.produce(q_atom, mq, w, slots, di, active, sq, memory, full, empty, share, lane)
        else:
            cute.arch.setmaxregister_increase(self.math_registers)
            self.math(slots, dk, parts, meta, mma, sq, memory, full, empty, share, cta, tid, warp, lane)

    @cute.jit
    def tiles_seen(self, run, block, group):
        """How many of a block's tiles of 128 keys a group of a run sees."""
        count = Int32(0)
        for tile in cutlass.range_constexpr(self.groups):
            key = block * self.keys + tile * TILE
            if group >= self.walk.first_group(run.seen, run.step, key) and key < run.visible:
                count += 1
        return count

    @cute.jit
    def produce(self, q_atom, mq, w, slots, di, active, sq, memory, full, empty, share, lane):
        one = cute.make_layout(1)
        q_memory, w_memory, di_memory, word_memory = memory
        first, offset, left = share
        stage, phase, landed_phase = Int32(0), Int32(0), Int32(0)
        block, group = self.walk.locate(self.walk.load_run(slots, first, lane), offset)
        while left > 0:
            run = self.walk.load_run(slots, first, lane)
            group = self.walk.begin(run, block, group)
            end = self.walk.end(run, block, group, left)
            left -= end - group
            flat = run.first_q * self.heads
            gq = cute.local_tile(cute.domain_offset((flat, 0), mq), (GROUP, self.dim), (None, 0))
            tqs, tqg = cute.nvgpu.cpasync.tma_partition(
                q_atom, 0, one, cute.group_modes(sq, 0, 2), cute.group_modes(gq, 0, 2)
            )
            for at in cutlass.range(group, end, unroll=1):
                slot, own = first + at // self.walk.slot_groups, at % self.walk.slot_groups
                tiles = self.tiles_seen(run, block, at)
                there = cutlass.min(run.columns - at * GROUP, GROUP)  # columns
                cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                barrier = full + (stage if there == GROUP else self.stages)
                with cute.arch.elect_one():
                    weights = cutlass.min(w.shape[0] - (flat + at * GROUP), GROUP) * 2
                    pairs = tiles * (self.queries * TILE * 2)
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        barrier, self.q_bytes + weights + pairs + tiles * (2 * WORDS)
                    )
                    bulk_load(w_memory + stage * self.w_bytes, w.iterator + Int64(flat + at * GROUP), weights, barrier)
                    for tile in cutlass.range_constexpr(self.groups):
                        if tile < tiles:
                            source = gradients_of(di, slot, block * self.groups + tile, own * self.queries)
                            target = di_memory + (stage * self.di_bytes + tile * (self.queries * TILE * 2))
                            bulk_load(target, source, Int32(self.queries * TILE * 2), barrier)
                    if tiles > 0:
                        source = active[slot, own, block * (2 * self.groups), None].iterator
                        bulk_load(word_memory + stage * self.word_bytes, source, tiles * (2 * WORDS), barrier)
                cute.copy(q_atom, tqg[None, at], tqs[None, stage], tma_bar_ptr=barrier)
                if there < GROUP:
                    # The last columns are another sequence's.
                    cute.arch.mbarrier_wait(full + self.stages, landed_phase)
                    landed_phase ^= 1
                    self.clear(Int32(q_memory.toint()) + stage * self.q_bytes, there, lane)
                    for column in cutlass.range(there + 2 * lane, GROUP, 64, unroll=1):
                        store_4(Int32(w_memory.toint()) + stage * self.w_bytes + 2 * column, Uint32(0))
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(full + stage)
                stage, phase = advance(stage, phase, self.stages)
            first, block, group, left = self.walk.following(run, slots, block, left)

    @cute.jit
    def clear(self, address, there, lane):
        """Rows `there` and on of a stage of q become 0."""
        for row in cutlass.range(there, GROUP, unroll=1):
            for part in cutlass.range_constexpr(self.dim // 64):
                store_4(address + part * (GROUP * 128) + row * 128 + 4 * lane, Uint32(0))

    @cute.jit
    def math(self, slots, dk, parts, meta, mma, sq, memory, full, empty, share, cta, tid, warp, lane):
        _, w_memory, di_memory, word_memory = memory
        thr = mma.get_slice(tid % WARPGROUP)
        columns = cute.make_tensor(sq.iterator, cute.select(sq.layout, mode=[1, 0, 2]))
        rb = mma.make_fragment_B(thr.partition_B(columns))
        shape = thr.partition_shape_A((BLOCK, GROUP))
        operands = [cute.make_rmem_tensor(shape, BFloat16) for _ in range(2)]
        words = [cute.recast_tensor(cute.make_tensor(x.iterator, cute.make_layout(32)), Uint32) for x in operands]
        accs = [cute.make_rmem_tensor(thr.partition_shape_C((BLOCK, self.dim)), Float32) for _ in range(2)]
        flats = [cute.make_tensor(x.iterator, cute.make_layout(self.dim // 2)) for x in accs]
        mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        tile = warp // 4
        # Of a matrix that this lane names a row of: the tile's 64 keys and the half of 16, or query and half.
        own_warp = warp % 4
        w_at = Int32(w_memory.toint()) + (lane >> 3) * 16
        di_at = Int32(di_memory.toint()) + tile * (self.queries * TILE * 2) + own_warp * 32 + ((lane >> 3) & 1) * 16
        if const_expr(self.queries == 1):
            di_at += (lane >> 4) * 128
        else:
            di_at += (lane >> 4) * (TILE * 2)
        word_at = Int32(word_memory.toint()) + tile * (2 * WORDS) + own_warp * 128 + word_place(lane) * 4
        self.clear_meta(meta, cta, tid)
        first, offset, left = share
        stage, phase = Int32(0), Int32(0)
        block, group = self.walk.locate(self.walk.load_run(slots, first, lane), offset)
        while left > 0:
            run = self.walk.load_run(slots, first, lane)
            group = self.walk.begin(run, block, group)
            end = self.walk.end(run, block, group, left)
            left -= end - group
            for acc in flats:
                acc.fill(0.0)
            key = block * self.keys + tile * TILE
            # The groups from which on the first, the second 64 of the keys are seen.
            seen_from, both_from = self.seen_from(run, key, end), self.seen_from(run, key + BLOCK, end)
            for at in cutlass.range(group, end, unroll=1):
                cute.arch.mbarrier_wait(full + stage, phase)
                if at >= both_from:
                    self.add(2, mma, accs, operands, words, rb, stage, w_at, di_at, word_at)
                elif at >= seen_from:
                    self.add(1, mma, accs, operands, words, rb, stage, w_at, di_at, word_at)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(empty + stage)
                stage, phase = advance(stage, phase, self.stages)
            if end > group:
                began = group == self.walk.first_group(run.seen, run.step, block * self.keys)
                ended = end == run.groups
                row = own_warp * 16 + (lane >> 2)
                if began and ended:
                    for b in cutlass.range_constexpr(2):
                        for half in cutlass.range_constexpr(2):
                            own = key + b * BLOCK + row + 8 * half
                            if own < run.keys:
                                self.store(flats[b], half, dk[run.first_k + own, None], True, lane)
                else:
                    which = Int32(1) if began else Int32(0)
                    for b in cutlass.range_constexpr(2):
                        for half in cutlass.range_constexpr(2):
                            own = tile * TILE + b * BLOCK + row + 8 * half
                            self.store(flats[b], half, parts[cta, which, own, None], False, lane)
                    if tid == 0:
                        if began:
                            meta[cta, TAIL] = 1
                            meta[cta, TAIL_KEY] = run.first_k + key
                            meta[cta, TAIL_KEYS] = cutlass.min(run.keys - key, self.keys)
                        else:
                            meta[cta, HEAD] = 1
                            meta[cta, HEAD_ENDS] = Int32(1) if ended else Int32(0)
            first, block, group, left = self.walk.following(run, slots, block, left)

    @cute.jit
    def seen_from(self, run, key, end):
        """The first group that sees a key; `end` if none does."""
        return self.walk.first_group(run.seen, run.step, key) if key < run.visible else end

    @cute.jit
    def add(self, blocks: cutlass.Constexpr, mma, accs, operands, words, rb, stage, w_at, di_at, word_at):
        """Add the products of a stage's columns to this warpgroup's first tile, or to both."""
        w_here, di_here = w_at + stage * self.w_bytes, di_at + stage * self.di_bytes
        word_here = word_at + stage * self.word_bytes
        w = [*load_pairs(w_here), *load_pairs(w_here + 64)]
        if const_expr(self.queries == 1):
            doubled = load_doubled(di_here)
        for b in cutlass.range_constexpr(blocks):
            word = load_4(word_here + b * WORDS)
            own = words[b]
            for query in cutlass.range_constexpr(self.queries):
                if const_expr(self.queries > 1 and query % 2 == 0):
                    pairs = load_doubled(di_here + (b * 128 + query * (TILE * 2)))
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
            cute.nvgpu.warpgroup.fence()
            for step in cutlass.range_constexpr(GROUP // 16):
                cute.gemm(mma, accs[b], operands[b][None, None, step], rb[None, None, step, stage], accs[b])
            cute.nvgpu.warpgroup.commit_group()
        cute.nvgpu.warpgroup.wait_group(0)

    @cute.jit
    def store(self, flat, half: cutlass.Constexpr, row, add: cutlass.Constexpr, lane):
        """A row's sums, in pairs of columns 8 apart, or what is there and they."""
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

    @cute.jit
    def clear_meta(self, meta, cta, tid):
        if tid == 0:
            for i in cutlass.range_constexpr(META):
                meta[cta, i] = 0

    @cute.kernel
    def add_parts(self, dk: cute.Tensor, parts: cute.Tensor, meta: cute.Tensor):
        """Add up the partial sums of the block that CTA x ends within: its own, then those of the CTAs behind it."""
        tid, _, _ = cute.arch.thread_idx()
        cta, part, _ = cute.arch.block_idx()
        index = part * SUM_THREADS + tid
        row, vector = index // (self.dim // 4), index % (self.dim // 4)
        if meta[cta, TAIL] == 1 and row < meta[cta, TAIL_KEYS]:
            target = cute.local_tile(dk[meta[cta, TAIL_KEY] + row, None], (4,), (vector,))
            total, more = cute.make_rmem_tensor((4,), Float32), cute.make_rmem_tensor((4,), Float32)
            cute.autovec_copy(cute.local_tile(parts[cta, 1, row, None], (4,), (vector,)), total)
            other, ends = cta + 1, Int32(0)
            while ends == 0 and other < meta.shape[0]:
                cute.autovec_copy(cute.local_tile(parts[other, 0, row, None], (4,), (vector,)), more)
                for i in cutlass.range_constexpr(4):
                    total[i] += more[i]
                ends = meta[other, HEAD_ENDS]
                other += 1
            cute.autovec_copy(target, more)
            for i in cutlass.range_constexpr(4):
                more[i] += total[i]
            cute.autovec_copy(more, target)


@cached
def compile_indexer_key_grad(heads: int, dim: int, config: IndexerKeyGradConfig):
    """-> f(q [Tq * H, D] bf16, w [Tq * H] bf16, slots [S, 8], di bf16 [S, N, 2, 64, 128],
    active uint32 [S, 2 H, 2 N, 128], dk [Tk, D] fp32, parts [ctas, 2, keys, D] fp32, meta int32 [ctas, 8]); S up to
    1024. Rows of q begin at multiples of 16 bytes."""
    columns, tokens, count, blocks, ctas = (cute.sym_int() for _ in range(5))

    def fake(dtype, shape, stride, align):
        return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)

    q = fake(BFloat16, (cute.sym_int(), dim), (dim, 1), 16)
    w = fake(BFloat16, (columns,), (1,), 16)
    strides = cute.sym_int64(divisibility=WARPGROUP), cute.sym_int64(divisibility=WARPGROUP), WARPGROUP, 1
    active = fake(Uint32, (count, SLOT_ROWS * heads // GROUP, blocks, WARPGROUP), strides, 16)
    dk = fake(Float32, (tokens, dim), (cute.sym_int64(divisibility=4), 1), 16)
    parts = fake(Float32, (ctas, 2, config.keys, dim), (2 * config.keys * dim, config.keys * dim, dim, 1), 16)
    meta = fake(Int32, (ctas, META), (META, 1), 16)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = IndexerKeyGradSm90(heads, dim, config)
    return compile_sm90(kernel, q, w, fake_slots(), fake_gradients(), active, dk, parts, meta, stream)


def choose_config(heads: int, dim: int) -> IndexerKeyGradConfig:
    """As many stages as there is room for, 12 at most. Where a stage is small, more keys share its queries."""
    groups = 3 if heads <= 16 and dim == 64 else 2
    return max(
        (c for n in range(2, 13) if (c := IndexerKeyGradConfig(groups, n)).shared(heads, dim) <= SHARED_BYTES),
        key=lambda config: config.stages,
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_indexer_key_grad, (heads, dim, choose_config(heads, dim)))
        for heads in (8, 16, 32, 64)
        for dim in (64, 128)
    ]
