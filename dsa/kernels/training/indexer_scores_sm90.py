"""Lightning-indexer scores in training: scores[t, j] = sum_h w[t, h] relu(q_h[t] . k[j]), all bf16 but w, in fp32, and
one bit for each (query, head, key): whether q_h[t] . k[j] > 0, which is all that the gradients need of the products.

Plan
- As the FP8 scores (fp8_mqa_logits_sm90.py): rows of a wgmma tile are 64 keys, its N columns the heads of N / H
  queries, so that the sum over heads is multiply-adds in registers and a transposing shuffle over the quad. Warpgroups
  take the key tiles in turns; a tile's last steps run under the next tile's wgmma.
- Keys come with their sign turned. The accumulators hold -q . k, whose sign bit is set where a head is active, not for
  a product of 0: a funnel shift an accumulator collects 32 of them to a word (indexer_bits.py).
- One warp loads by TMA: queries double-buffered, keys through a ring of 64-key stages for each warpgroup.
- Persistent CTAs; a unit of work is N / H queries of a slot with all keys that one of them sees (indexer_units.py).
  What lies in a tile beyond a query's keys, or in the unit beyond its rows, is written as it comes, or not at all.
Shared memory: 2 x N x D x 2 bytes of queries, GROUPS x STAGES x 64 x D x 2 of keys, barriers (at most 225 KiB).
Registers: N / 2 accumulators and N / 4 weights a math thread, of 232 (two warpgroups) or 160; 40 or 32 for the others.
Roofline: tensor cores, 1024 clocks for a tile of 64 x 256 x 128, and about one clock for each instruction beside them,
three an accumulator: 400. Keys come from L2, 16 KB a tile; 12 bytes a (query, key) are written at 64 heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Uint32, const_expr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.pipeline import advance
from dsa.cute.reductions import quad_transpose
from dsa.cute.score_tile import REGISTERS, SHARED_BYTES, WARPGROUP, init_ring, multiply, tile_load
from dsa.kernels.training.indexer_bits import negated_head_sum, sign_bits, word_place
from dsa.kernels.training.indexer_slots import BLOCK, GROUP, SLOT_ROWS, fake_slots, fake_tiles
from dsa.kernels.training.indexer_units import Units, fake_tickets


@dataclass(frozen=True)
class IndexerScoresConfig:
    """columns: N; groups: math warpgroups; stages: key tiles in flight for each of them."""

    columns: int
    groups: int
    stages: int

    @property
    def threads(self) -> int:
        return (self.groups + 1) * WARPGROUP

    def shared(self, dim: int) -> int:
        return (2 * self.columns + self.groups * self.stages * BLOCK) * dim * 2 + 3 * 1024


class IndexerScoresSm90:
    def __init__(self, heads: int, dim: int, cfg: IndexerScoresConfig):
        self.heads, self.dim = heads, dim
        self.n, self.group_stages, self.groups = cfg.columns, cfg.stages, cfg.groups
        self.stages = cfg.groups * cfg.stages
        self.math_warps, self.threads = 4 * cfg.groups, cfg.threads
        self.math_registers, self.other_registers = REGISTERS[cfg.groups]
        self.block_q = cfg.columns // heads
        self.units = Units(self.block_q)
        self.words = cfg.columns // GROUP

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        weights: cute.Tensor,
        slots: cute.Tensor,
        scores: cute.Tensor,
        active: cute.Tensor,
        tickets: cute.Tensor,
        ctas: Int32,
        stream,
    ):
        k_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (BLOCK, self.n, self.dim), BFloat16, self.stages)
        q_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (BLOCK, self.n, self.dim), BFloat16, 2)
        k_atom, k_tma = tile_load(k, k_layout, (BLOCK, self.dim))
        q_atom, q_tma = tile_load(q, q_layout, (self.n, self.dim))
        major = cute.nvgpu.OperandMajorMode.K
        mma = sm90.make_trivial_tiled_mma(BFloat16, BFloat16, major, major, Float32, (1, 1, 1), (BLOCK, self.n))

        @cute.struct
        class Storage:
            k_full: cute.struct.MemRange[cutlass.Int64, self.stages]
            k_empty: cute.struct.MemRange[cutlass.Int64, self.stages]
            q_full: cute.struct.MemRange[cutlass.Int64, 2]
            q_empty: cute.struct.MemRange[cutlass.Int64, 2]
            units: self.units.storage()
            q: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[BFloat16, cute.cosize(k_layout)], 1024]

        self.storage = Storage
        self.kernel(
            q_atom, q_tma, k_atom, k_tma, weights, slots, scores, active, tickets, mma, q_layout, k_layout
        ).launch(grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        mq: cute.Tensor,
        k_atom: cute.CopyAtom,
        mk: cute.Tensor,
        weights: cute.Tensor,
        slots: cute.Tensor,
        scores: cute.Tensor,
        active: cute.Tensor,
        tickets: cute.Tensor,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        k_full, k_empty = storage.k_full.data_ptr(), storage.k_empty.data_ptr()
        q_full, q_empty = storage.q_full.data_ptr(), storage.q_empty.data_ptr()
        rings = (k_full, k_empty, q_full, q_empty)
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)

        if warp == self.math_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(q_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(k_atom)
        if tid == 0:
            init_ring(k_full, k_empty, self.stages, 4)
            init_ring(q_full, q_empty, 2, self.math_warps)
            self.units.init(storage.units, self.math_warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp >= self.math_warps:
            cute.arch.setmaxregister_decrease(self.other_registers)
            if warp == self.math_warps:
                self.produce(q_atom, mq, k_atom, mk, slots, tickets, storage.units, sq, sk, rings, lane)
        else:
            cute.arch.setmaxregister_increase(self.math_registers)
            self.math(weights, scores, active, mma, storage.units, sq, sk, rings, tid, warp, lane)

    @cute.jit
    def produce(self, q_atom, mq, k_atom, mk, slots, tickets, storage, sq, sk, rings, lane):
        k_full, k_empty, q_full, q_empty = rings
        one = cute.make_layout(1)
        place, place_phase, group, turn, phase = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        number, unit_place = Int32(0), (Int32(0), Int32(0))
        while number >= 0:
            number, slot, row, unit_place = self.units.name(storage, tickets, slots, unit_place, lane)
            tiles = cute.ceil_div(slot.seen_by(row, self.block_q), BLOCK)
            if number >= 0 and tiles > 0:
                flat = (slot.first_q + row) * self.heads
                gq = cute.local_tile(cute.domain_offset((flat, 0), mq), (self.n, self.dim), (0, 0))
                gk = cute.local_tile(cute.domain_offset((slot.first_k, 0), mk), (BLOCK, self.dim), (None, 0))
                tqs, tqg = cute.nvgpu.cpasync.tma_partition(
                    q_atom, 0, one, cute.group_modes(sq, 0, 2), cute.group_modes(gq, 0, 2)
                )
                tks, tkg = cute.nvgpu.cpasync.tma_partition(
                    k_atom, 0, one, cute.group_modes(sk, 0, 2), cute.group_modes(gk, 0, 2)
                )
                cute.arch.mbarrier_wait(q_empty + place, place_phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(q_full + place, self.n * self.dim * 2)
                cute.copy(q_atom, tqg, tqs[None, place], tma_bar_ptr=q_full + place)
                place, place_phase = advance(place, place_phase, 2)
                for tile in cutlass.range(tiles, unroll=1):
                    stage = group * self.group_stages + turn
                    cute.arch.mbarrier_wait(k_empty + stage, phase ^ 1)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(k_full + stage, BLOCK * self.dim * 2)
                    cute.copy(k_atom, tkg[None, tile], tks[None, stage], tma_bar_ptr=k_full + stage)
                    group += 1
                    if group == self.groups:
                        group = Int32(0)
                        turn, phase = advance(turn, phase, self.group_stages)

    @cute.jit
    def math(self, weights, scores, active, mma, storage, sq, sk, rings, tid, warp, lane):
        k_full, k_empty, q_full, q_empty = rings
        thr_mma = mma.get_slice(tid % WARPGROUP)
        ra, rb = mma.make_fragment_A(thr_mma.partition_A(sk)), mma.make_fragment_B(thr_mma.partition_B(sq))
        acc = cute.make_rmem_tensor(thr_mma.partition_shape_C((BLOCK, self.n)), Float32)
        flat = cute.make_tensor(acc.iterator, cute.make_layout(self.n // 2))
        sums, words = cute.make_rmem_tensor((2 * self.block_q,), Float32), cute.make_rmem_tensor((self.words,), Uint32)
        sums.fill(0.0)
        words.fill(0)
        w = cute.make_rmem_tensor((self.n // 4,), Float32)
        queries = weights.shape[0]
        quad = lane & 3
        own_ring = warp // 4 * self.group_stages
        own_key = (warp % 4) * 16 + (lane >> 2)
        own_word = (warp % 4) * 32 + word_place(lane)
        place, place_phase, turn, phase = Int32(0), Int32(0), Int32(0), Int32(0)
        # Tiles go to the warpgroups in turns over the whole life of the CTA: none has two more than another.
        mine = warp // 4
        number, unit_place = Int32(0), (Int32(0), Int32(0))
        while number >= 0:
            unit, unit_place = self.units.read(storage, unit_place)
            number, row, tiles = unit.slot, unit.row, cute.ceil_div(unit.visible, BLOCK)
            if number >= 0 and tiles > 0:
                # A lane's scores: of every fourth query and of both keys, or of two queries it has one and a key.
                own_scores = scores[number, None, row + quad, own_key].iterator
                if const_expr(self.block_q == 2):
                    own_scores = scores[number, None, row + (quad >> 1), own_key + 8 * (quad & 1)].iterator
                own_active = active[number, row * self.heads // GROUP, None, own_word].iterator
                word_stride = active.stride[1]
                for j in cutlass.range_constexpr(self.n // 8):
                    t = cutlass.min(unit.first_q + row + j * 8 // self.heads, queries - 1)
                    for c in cutlass.range_constexpr(2):
                        w[2 * j + c] = weights[t, j * 8 % self.heads + quad * 2 + c] * 0.5
                cute.arch.mbarrier_wait(q_full + place, place_phase)
                unfinished = Int32(-1)
                if mine < tiles:
                    cute.arch.mbarrier_wait(k_full + own_ring + turn, phase)
                while mine < tiles:
                    stage = own_ring + turn
                    multiply(mma, acc, ra, rb, stage, place)
                    # While it runs: the rest of the last tile, and the next one's keys.
                    self.finish(sums, words, own_scores, own_active, word_stride, unfinished, quad)
                    unfinished = mine
                    turn, phase = advance(turn, phase, self.group_stages)
                    mine += self.groups
                    if mine < tiles:
                        cute.arch.mbarrier_wait(k_full + own_ring + turn, phase)
                    cute.nvgpu.warpgroup.wait_group(0)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(k_empty + stage)
                    for t in cutlass.range_constexpr(self.block_q):
                        sums[2 * t], sums[2 * t + 1] = negated_head_sum(flat, w, t, self.heads)
                    for group in cutlass.range_constexpr(self.words):
                        words[group] = sign_bits(flat, group)
                self.finish(sums, words, own_scores, own_active, word_stride, unfinished, quad)
                mine -= tiles
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(q_empty + place)
                place, place_phase = advance(place, place_phase, 2)

    @cute.jit
    def finish(self, sums, words, own_scores, own_active, word_stride, tile, quad):
        """Store a tile's words; add up the quads' sums over heads, give each lane its queries, store them. There may be
        no tile: -1."""
        upper, odd = (quad & 2) != 0, (quad & 1) != 0
        if tile >= 0:
            for group in cutlass.range_constexpr(self.words):
                (own_active + (group * word_stride + tile * WARPGROUP)).store(words[group])
            first = own_scores + ((tile >> 1) * (SLOT_ROWS * SLOT_ROWS) + (tile & 1) * BLOCK)
            if const_expr(self.block_q == 2):
                first.store(quad_transpose(*(sums[i] for i in range(4)), upper, odd))
            else:
                for i in cutlass.range_constexpr(self.block_q // 4):
                    for half in cutlass.range_constexpr(2):
                        value = quad_transpose(*(sums[2 * (4 * i + j) + half] for j in range(4)), upper, odd)
                        (first + (4 * i * SLOT_ROWS + 8 * half)).store(value)


@cached
def compile_indexer_scores(heads: int, dim: int, config: IndexerScoresConfig):
    """-> f(q [Tq * H, D] bf16, minus_k [Tk, D] bf16, w [Tq, H], slots [S, 8], scores [S, N, 128, 128],
    active uint32 [S, 2 H, 2 N, 128], tickets int32 [1] of 0, ctas); Tq, Tk, S, N > 0. Rows of q and minus_k begin at
    multiples of 16 bytes."""
    queries, count, blocks = (cute.sym_int() for _ in range(3))

    def fake(dtype, shape, stride, align):
        return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)

    q = fake(BFloat16, (cute.sym_int(), dim), (dim, 1), 16)
    k = fake(BFloat16, (cute.sym_int(), dim), (cute.sym_int64(divisibility=8), 1), 16)
    weights = fake(Float32, (queries, heads), (cute.sym_int64(), 1), 4)
    scores = fake_tiles(Float32, SLOT_ROWS, SLOT_ROWS)
    stride = cute.sym_int64(divisibility=WARPGROUP)
    groups = SLOT_ROWS * heads // GROUP
    active = fake(
        Uint32, (count, groups, blocks, WARPGROUP), (cute.sym_int64(divisibility=WARPGROUP), stride, WARPGROUP, 1), 16
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = IndexerScoresSm90(heads, dim, config)
    return compile_sm90(kernel, q, k, weights, fake_slots(), scores, active, fake_tickets(), Int32(1), stream)


def choose_config(heads: int, dim: int) -> IndexerScoresConfig:
    """Fewer heads mean more queries a tile, whose reductions need registers: smaller tiles, and a third warpgroup. As
    many stages as there is room for, 6 at most."""
    columns, groups = (256, 2) if heads == 64 else (128, 3)
    return max(
        (
            config
            for stages in range(1, 7)
            if (config := IndexerScoresConfig(columns, groups, stages)).shared(dim) <= SHARED_BYTES
        ),
        key=lambda config: config.stages,
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_indexer_scores, (heads, dim, choose_config(heads, dim)))
        for heads in (8, 16, 32, 64)
        for dim in (64, 128)
    ]
