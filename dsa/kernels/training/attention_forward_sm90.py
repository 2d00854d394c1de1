"""Attention over sequences that lie one after another, with the LSE of its softmax:
out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, h']) v[j, h'], h' = h // (H / Hk), over the keys j that query t sees.

Plan
- A tile is ROWS query rows of one head; each math warpgroup has 64 of them. It walks the tile's blocks of 128 keys from
  the last to the first: what the mask cuts comes at once.
- While a block's softmax is computed the tensor cores have the product of the block before with its values, and in
  front of it that of the next block's scores: both are started together. Warpgroups take turns in starting them.
- There is no gap between tiles: the last product with values is started with the next tile's first scores.
- The maximum that powers are relative to may lag behind the true one by a factor of 2^8, so that the output is rescaled
  only when it must be.
- One warp loads by TMA, into rings of queries, keys and values. One places tiles: the heads of a group, whose keys the
  L2 cache holds, have their tiles taken together, the longest first. One puts zeros over the rows of the last block of
  values that belong to no key of the sequence, as 0 * NaN is NaN.
- Results go through shared memory, a warp's 16 rows at a time, to be stored 128 bytes in a row.
Shared memory: Q_SLOTS x ROWS x D, two blocks of keys and two of values, 2 KiB a math warp for results, barriers.
Registers: 64 scores, 32 pairs of powers and DV / 2 sums a math thread, of 240 (two warpgroups) or 160 (three). Of
D = 192 queries go to registers, too, so that wgmma reads less shared memory and their slot is soon free.
Roofline: power. 4096 FLOP a clock and SM, and an H200 falls to 1.5 GHz at it, as for cuBLAS, of which 90% is reached.
Shared memory is busy 112 of 128 bytes a clock meanwhile (D = DV = 128).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.fake_tensors import cute_dtype
from dsa.cute.pipeline import advance
from dsa.cute.shared_memory import load_16, load_matrices, pack, store_matrices
from dsa.kernels.training.attention_tiles import (
    BLOCKS,
    FACTS,
    FIELDS,
    FIRST,
    HEAD,
    KEY,
    KEY_COUNT,
    KV_HEAD,
    QUERY,
    ROW_COUNT,
    VALUE_ROWS,
    Schedule,
    clear_values,
)

WARPGROUP = 128
KEYS = 128  # of a block
STAGES = 2  # blocks of keys, and of values, in shared memory
SHARED_BYTES = 232448
REGISTERS = {2: (240, 24), 3: (160, 32)}  # by math warpgroups: of a math thread and of the others
LAG = 8.0  # the most, in powers of two, that a power may exceed 1 by
NOTHING = -3e38  # finite, so that a difference to it is no NaN
LN2 = 0.6931471805599453
FIRST_TURN = 1  # named barriers: a warpgroup's turn
OUT_ROWS, OUT_COLUMNS = 16, 64  # results of a warp on their way out


@dataclass(frozen=True)
class AttentionConfig:
    """dim, value_dim: of a head; groups: math warpgroups of 64 rows; q_slots: tiles whose queries are in shared memory
    at a time; held: from there they go to registers."""

    dim: int
    value_dim: int
    groups: int
    q_slots: int
    held: bool

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return (self.groups + 1) * WARPGROUP

    def fits(self) -> bool:
        """Whether shared memory holds it."""
        queries = self.q_slots * self.rows * self.dim
        loaded = STAGES * KEYS * (self.dim + self.value_dim)
        staged = 4 * self.groups * OUT_ROWS * OUT_COLUMNS
        return 2 * (queries + loaded + staged) + 3 * 1024 <= SHARED_BYTES


class AttentionForwardSm90:
    def __init__(self, dtype: type[cutlass.Numeric], cfg: AttentionConfig):
        self.dtype, self.cfg = dtype, cfg
        self.rows, self.dim, self.value_dim = cfg.rows, cfg.dim, cfg.value_dim
        self.math_warps = 4 * cfg.groups

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        cu_q: cute.Tensor,
        cu_k: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        counter: cute.Tensor,
        scale: Float32,
        causal: Int32,
        group: Int32,
        ctas: Int32,
        stream,
    ):
        cfg = self.cfg
        q_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (self.rows, KEYS, self.dim), self.dtype, cfg.q_slots)
        k_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (self.rows, KEYS, self.dim), self.dtype, STAGES)
        v_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (self.rows, KEYS, self.value_dim), self.dtype, STAGES)
        ratio = q.shape[1] // k.shape[1]
        loads = [
            head_load(x, layout, shape)
            for x, layout, shape in (
                (q, q_layout, (self.rows, self.dim)),
                (k, k_layout, (KEYS, self.dim)),
                (v, v_layout, (KEYS, self.value_dim)),
            )
        ]

        @cute.struct
        class Storage:
            q_full: cute.struct.MemRange[Int64, cfg.q_slots]
            q_empty: cute.struct.MemRange[Int64, cfg.q_slots]
            k_full: cute.struct.MemRange[Int64, STAGES]
            k_empty: cute.struct.MemRange[Int64, STAGES]
            v_full: cute.struct.MemRange[Int64, STAGES]
            v_empty: cute.struct.MemRange[Int64, STAGES]
            v_loaded: cute.struct.MemRange[Int64, STAGES]
            facts_full: cute.struct.MemRange[Int64, FACTS]
            facts_empty: cute.struct.MemRange[Int64, FACTS]
            facts: cute.struct.MemRange[Int32, FIELDS * FACTS]
            out: cute.struct.Align[cute.struct.MemRange[Int32, self.math_warps * OUT_ROWS * OUT_COLUMNS // 2], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(v_layout)], 1024]

        assert Storage.size_in_bytes() <= SHARED_BYTES
        self.storage = Storage
        self.kernel(
            *(loads[0][0], loads[0][1], loads[1][0], loads[1][1], loads[2][0], loads[2][1]),
            *(cu_q, cu_k, out, lse, counter, scale, causal, group, ratio, q_layout, k_layout, v_layout),
        ).launch(grid=(ctas, 1, 1), block=(cfg.threads, 1, 1), stream=stream, min_blocks_per_mp=1)

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        mq: cute.Tensor,
        k_atom: cute.CopyAtom,
        mk: cute.Tensor,
        v_atom: cute.CopyAtom,
        mv: cute.Tensor,
        cu_q: cute.Tensor,
        cu_k: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        counter: cute.Tensor,
        scale: Float32,
        causal: Int32,
        group: Int32,
        ratio: Int32,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        v_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        sv = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        facts = storage.facts.get_tensor(cute.make_layout((FIELDS, FACTS)))
        cfg = self.cfg

        if warp == self.math_warps:
            for atom in (q_atom, k_atom, v_atom):
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
        if tid == 0:
            for ring, stages in (("q", cfg.q_slots), ("k", STAGES), ("v", STAGES)):
                for i in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(getattr(storage, f"{ring}_full").data_ptr() + i, 1)
                    cute.arch.mbarrier_init(getattr(storage, f"{ring}_empty").data_ptr() + i, self.math_warps)
            for i in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(storage.v_loaded.data_ptr() + i, 1)
            for i in cutlass.range_constexpr(FACTS):
                cute.arch.mbarrier_init(storage.facts_full.data_ptr() + i, 1)
                cute.arch.mbarrier_init(storage.facts_empty.data_ptr() + i, self.math_warps + 2)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        if warp >= self.math_warps:
            cute.arch.setmaxregister_decrease(REGISTERS[cfg.groups][1])
            if warp == self.math_warps:
                self.load(storage, q_atom, mq, k_atom, mk, v_atom, mv, facts, sq, sk, sv)
            elif warp == self.math_warps + 1:
                schedule = Schedule(
                    *(cu_q, cu_k, counter, Int32(out.shape[1]), group, ratio, causal),
                    *(self.rows, KEYS),
                )
                schedule.run(facts, storage.facts_full.data_ptr(), storage.facts_empty.data_ptr(), lane)
            elif warp == self.math_warps + 2:
                self.clear(storage, facts, sv, lane)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[cfg.groups][0])
            self.math(storage, out, lse, scale, facts, sq, sk, sv, tid, warp, lane)

    @cute.jit
    def load(self, storage, q_atom, mq, k_atom, mk, v_atom, mv, facts, sq, sk, sv):
        """The loading warp."""
        cfg, width = self.cfg, self.dtype.width // 8
        q_bytes, k_bytes = self.rows * self.dim * width, KEYS * self.dim * width
        v_bytes = KEYS * self.value_dim * width
        at, at_phase = Int32(0), Int32(0)
        q_place, k_place, v_place = (Int32(0), Int32(0)), (Int32(0), Int32(0)), (Int32(0), Int32(0))
        blocks = Int32(1)
        while blocks > 0:
            cute.arch.mbarrier_wait(storage.facts_full.data_ptr() + at, at_phase)
            blocks, query, head = facts[BLOCKS, at], facts[QUERY, at], facts[HEAD, at]
            key, kv_head, value_rows = facts[KEY, at], facts[KV_HEAD, at], facts[VALUE_ROWS, at]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(storage.facts_empty.data_ptr() + at)
            at, at_phase = advance(at, at_phase, FACTS)
            if blocks > 0:
                tq, gq = blocks_of(q_atom, mq, sq, query, head, (self.rows, self.dim))
                tk, gk = blocks_of(k_atom, mk, sk, key, kv_head, (KEYS, self.dim))
                tv, gv = blocks_of(v_atom, mv, sv, key, kv_head, (KEYS, self.value_dim))
                slot, phase = q_place
                cute.arch.mbarrier_wait(storage.q_empty.data_ptr() + slot, phase ^ 1)
                full = storage.q_full.data_ptr() + slot
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(full, q_bytes)
                cute.copy(q_atom, gq[None, 0], tq[None, slot], tma_bar_ptr=full)
                q_place = advance(slot, phase, cfg.q_slots)
                for i in cutlass.range(blocks, unroll=1):
                    n = blocks - 1 - i
                    stage, k_phase = k_place
                    cute.arch.mbarrier_wait(storage.k_empty.data_ptr() + stage, k_phase ^ 1)
                    k_full = storage.k_full.data_ptr() + stage
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(k_full, k_bytes)
                    cute.copy(k_atom, gk[None, n], tk[None, stage], tma_bar_ptr=k_full)
                    k_place = advance(stage, k_phase, STAGES)
                    v_stage, v_phase = v_place
                    cute.arch.mbarrier_wait(storage.v_empty.data_ptr() + v_stage, v_phase ^ 1)
                    v_full = storage.v_full.data_ptr() + v_stage
                    if i == 0 and value_rows < KEYS:
                        v_full = storage.v_loaded.data_ptr() + v_stage
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(v_full, v_bytes)
                    cute.copy(v_atom, gv[None, n], tv[None, v_stage], tma_bar_ptr=v_full)
                    v_place = advance(v_stage, v_phase, STAGES)

    @cute.jit
    def clear(self, storage, facts, sv, lane):
        """The warp that clears values which no key of the sequence has."""
        at, at_phase, blocks, stage, phases = Int32(0), Int32(0), Int32(1), Int32(0), Int32(0)
        while blocks > 0:
            cute.arch.mbarrier_wait(storage.facts_full.data_ptr() + at, at_phase)
            blocks, value_rows = facts[BLOCKS, at], facts[VALUE_ROWS, at]
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(storage.facts_empty.data_ptr() + at)
            at, at_phase = advance(at, at_phase, FACTS)
            if blocks > 0:
                if value_rows < KEYS:
                    cute.arch.mbarrier_wait(storage.v_loaded.data_ptr() + stage, (phases >> stage) & 1)
                    phases = phases ^ (1 << stage)
                    clear_values(sv, stage, value_rows, KEYS, self.value_dim, lane)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(storage.v_full.data_ptr() + stage)
                stage = (stage + blocks) % STAGES

    def score_mma(self) -> cute.TiledMma:
        major, sources = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.warpgroup.OperandSource
        source = sources.RMEM if self.cfg.held else sources.SMEM
        return sm90.make_trivial_tiled_mma(
            *(self.dtype, self.dtype, major, major, Float32, (self.cfg.groups, 1, 1), (64, KEYS), source)
        )

    def value_mma(self) -> cute.TiledMma:
        k_major, mn_major = cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.MN
        source = cute.nvgpu.warpgroup.OperandSource.RMEM
        return sm90.make_trivial_tiled_mma(
            *(self.dtype, self.dtype, k_major, mn_major, Float32, (self.cfg.groups, 1, 1), (64, self.value_dim), source)
        )

    @cute.jit
    def math(self, storage, out, lse, scale, facts, sq, sk, sv, tid, warp, lane):
        """A math warpgroup: its 64 rows of every tile of this CTA."""
        cfg, groups = self.cfg, self.cfg.groups
        score_mma, value_mma = self.score_mma(), self.value_mma()
        score_thr, value_thr = score_mma.get_slice(tid), value_mma.get_slice(tid)
        values = cute.make_tensor(sv.iterator, cute.select(sv.layout, mode=[1, 0, 2]))
        if const_expr(cfg.held):
            rq = cute.make_rmem_tensor(score_thr.partition_shape_A((self.rows, self.dim)), self.dtype)
        else:
            rq = score_mma.make_fragment_A(score_thr.partition_A(sq))
        rk = score_mma.make_fragment_B(score_thr.partition_B(sk))
        rv = value_mma.make_fragment_B(value_thr.partition_B(values))
        scores = cute.make_rmem_tensor(score_thr.partition_shape_C((self.rows, KEYS)), Float32)
        sums = cute.make_rmem_tensor(value_thr.partition_shape_C((self.rows, self.value_dim)), Float32)
        powers = cute.make_rmem_tensor(value_thr.partition_shape_A((self.rows, KEYS)), self.dtype)
        s = cute.make_tensor(scores.iterator, cute.make_layout(KEYS // 2))
        o = cute.make_tensor(sums.iterator, cute.make_layout(self.value_dim // 2))
        p = cute.make_tensor(cute.recast_ptr(powers.iterator, dtype=Uint32), cute.make_layout(KEYS // 4))
        top, total = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)
        factor = cute.make_rmem_tensor((2,), Float32)
        limits = cute.make_rmem_tensor((2,), Int32)
        value_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        group = warp // 4
        own_row = warp * 16 + (lane >> 2)
        k_full, k_empty = storage.k_full.data_ptr(), storage.k_empty.data_ptr()
        v_full, v_empty = storage.v_full.data_ptr(), storage.v_empty.data_ptr()
        facts_full, facts_empty = storage.facts_full.data_ptr(), storage.facts_empty.data_ptr()
        q_full, q_empty = storage.q_full.data_ptr(), storage.q_empty.data_ptr()
        staged = storage.out.data_ptr().toint() + warp * (OUT_ROWS * OUT_COLUMNS * 2)

        if group == groups - 1:
            self.pass_turn(group)
        at, at_phase = Int32(0), Int32(0)
        slot, slot_phase, k_stage, k_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        v_stage, v_phase = Int32(0), Int32(0)
        cute.arch.mbarrier_wait(facts_full + at, at_phase)
        blocks = facts[BLOCKS, at]
        if blocks > 0:
            cute.arch.mbarrier_wait(q_full + slot, slot_phase)
            cute.arch.mbarrier_wait(k_full + k_stage, k_phase)
        self.take_queries(rq, sq, slot, warp, lane)
        cute.nvgpu.warpgroup.fence()
        self.start_scores(scores, rq, rk, slot, k_stage)
        cute.nvgpu.warpgroup.wait_group(0)
        while blocks > 0:
            # This tile's first scores are there.
            release(k_empty + k_stage)
            k_stage, k_phase = advance(k_stage, k_phase, STAGES)
            if cfg.held or blocks == 1:
                release(q_empty + slot)
            key_count = facts[KEY_COUNT, at]
            first = facts[FIRST, at]
            for r in cutlass.range_constexpr(2):
                limits[r] = cutlass.min(key_count, first + own_row + 8 * r) - 2 * (lane & 3)
            clear = cutlass.min(key_count, first + 64 * group)
            key = (blocks - 1) * KEYS
            top.fill(NOTHING)
            total.fill(0.0)
            o.fill(0.0)
            self.softmax(s, top, total, factor, limits, clear, key, scale)
            self.pack_powers(s, p)
            for _ in cutlass.range(blocks - 1, unroll=1):
                key -= KEYS
                cute.arch.mbarrier_wait(k_full + k_stage, k_phase)
                self.take_turn(group)
                cute.nvgpu.warpgroup.fence()
                self.start_scores(scores, rq, rk, slot, k_stage)
                cute.arch.mbarrier_wait(v_full + v_stage, v_phase)
                self.start_sums(value_mma, sums, powers, rv, v_stage)
                self.pass_turn(group)
                cute.nvgpu.warpgroup.wait_group(1)
                release(k_empty + k_stage)
                k_stage, k_phase = advance(k_stage, k_phase, STAGES)
                if const_expr(not cfg.held):
                    if key == 0:
                        release(q_empty + slot)
                rose = self.softmax(s, top, total, factor, limits, clear, key, scale)
                # A wait of its own for each case: in front of the branch it would be moved before most powers.
                if rose:
                    cute.nvgpu.warpgroup.wait_group(0)
                    for i in cutlass.range_constexpr(self.value_dim // 2):
                        o[i] *= factor[i // 2 % 2]
                else:
                    cute.nvgpu.warpgroup.wait_group(0)
                release(v_empty + v_stage)
                v_stage, v_phase = advance(v_stage, v_phase, STAGES)
                self.pack_powers(s, p)

            last = at
            at, at_phase = advance(at, at_phase, FACTS)
            cute.arch.mbarrier_wait(facts_full + at, at_phase)
            blocks = facts[BLOCKS, at]
            slot, slot_phase = advance(slot, slot_phase, cfg.q_slots)
            if blocks > 0:
                cute.arch.mbarrier_wait(q_full + slot, slot_phase)
                cute.arch.mbarrier_wait(k_full + k_stage, k_phase)
            self.take_queries(rq, sq, slot, warp, lane)
            self.take_turn(group)
            # Behind the last tile these are scores of what happens to be there, which nobody reads.
            cute.nvgpu.warpgroup.fence()
            self.start_scores(scores, rq, rk, slot, k_stage)
            cute.arch.mbarrier_wait(v_full + v_stage, v_phase)
            self.start_sums(value_mma, sums, powers, rv, v_stage)
            self.pass_turn(group)
            cute.nvgpu.warpgroup.wait_group(0)
            release(v_empty + v_stage)
            v_stage, v_phase = advance(v_stage, v_phase, STAGES)
            self.store(o, top, total, out, lse, facts, last, staged, own_row, warp, lane)
            release(facts_empty + last)

    @cute.jit
    def take_turn(self, group):
        cute.arch.barrier(barrier_id=FIRST_TURN + group, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self, group):
        following = 0 if group == self.cfg.groups - 1 else group + 1
        cute.arch.barrier_arrive(barrier_id=FIRST_TURN + following, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def take_queries(self, rq, sq, slot, warp, lane):
        """A warp's 16 rows of a tile's queries to registers, if that is where they are used."""
        if const_expr(self.cfg.held):
            words = cute.make_tensor(cute.recast_ptr(rq.iterator, dtype=Uint32), cute.make_layout((4, self.dim // 16)))
            row = warp * 16 + lane % 16
            start = Int32(sq.iterator.toint()) + slot * (self.rows * self.dim * 2) + row * 128
            for step in cutlass.range_constexpr(self.dim // 16):
                chunk = (step % 4 * 2 + lane // 16) ^ (row % 8)
                for i, word in enumerate(load_matrices(start + step // 4 * (self.rows * 128) + chunk * 16)):
                    words[i, step] = word

    @cute.jit
    def start_scores(self, scores, rq, rk, slot, stage):
        mma = self.score_mma()  # what is set inside a loop cannot be used behind it
        for step in cutlass.range_constexpr(self.dim // 16):
            mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
            place = (None, None, step) if self.cfg.held else (None, None, step, slot)
            cute.gemm(mma, scores, rq[place], rk[None, None, step, stage], scores)
        cute.nvgpu.warpgroup.commit_group()

    @cute.jit
    def start_sums(self, mma, sums, powers, rv, stage):
        for step in cutlass.range_constexpr(KEYS // 16):
            cute.gemm(mma, sums, powers[None, None, step], rv[None, None, step, stage], sums)
        cute.nvgpu.warpgroup.commit_group()

    @cute.jit
    def softmax(self, s, top, total, factor, limits, clear, key, scale):
        """Scores of the keys from `key` on to powers. -> whether `factor` is to be applied to the sums before.

        limits   how many keys the lane's two rows see, less the lane's first column
        clear    how many keys all rows of the warpgroup see
        """
        if key + KEYS > clear:
            for i in cutlass.range_constexpr(KEYS // 2):
                if limits[i // 2 % 2] - key <= i // 4 * 8 + i % 2:
                    s[i] = -Float32(float("inf"))
        highest = cute.make_rmem_tensor((2,), Float32)
        for r in cutlass.range_constexpr(2):
            value = s[2 * r]
            for i in cutlass.range_constexpr(1, KEYS // 4):
                value = cute.arch.fmax(value, s[i // 2 * 4 + 2 * r + i % 2])
            value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=1))
            highest[r] = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, offset=2)) * scale
        factor.fill(1.0)
        rose = cute.arch.vote_any_sync(highest[0] > top[0] + LAG or highest[1] > top[1] + LAG)
        if rose:
            for r in cutlass.range_constexpr(2):
                if highest[r] > top[r] + LAG:
                    factor[r] = cute.math.exp2(top[r] - highest[r], fastmath=True)
                    top[r] = highest[r]
                    total[r] *= factor[r]
        for i in cutlass.range_constexpr(KEYS // 2):
            s[i] = cute.math.exp2(cute.math.fma(s[i], scale, -top[i // 2 % 2]), fastmath=True)
        for i in cutlass.range_constexpr(KEYS // 2):
            total[i // 2 % 2] += s[i]
        return rose

    @cute.jit
    def pack_powers(self, s, p):
        for i in cutlass.range_constexpr(KEYS // 4):
            p[i] = pack(s[2 * i], s[2 * i + 1], self.dtype)

    @cute.jit
    def store(self, o, top, total, out, lse, facts, at, staged, own_row, warp, lane):
        """Results of a warp's 16 rows, through its part of shared memory, whose rows are 128 bytes: the chunk of 16
        bytes c of row r lies where c ^ (r % 8) would."""
        query, row_count, head = facts[QUERY, at], facts[ROW_COUNT, at], facts[HEAD, at]
        inverse = cute.make_rmem_tensor((2,), Float32)
        for r in cutlass.range_constexpr(2):
            amount = total[r] + cute.arch.shuffle_sync_bfly(total[r], offset=1)
            amount += cute.arch.shuffle_sync_bfly(amount, offset=2)
            inverse[r] = 0.0 if amount == 0.0 else 1.0 / amount
            if lane % 4 == 0 and own_row + 8 * r < row_count:
                result = top[r] * LN2 + cute.math.log(amount)
                lse[head, query + own_row + 8 * r] = Float32(float("inf")) if amount == 0.0 else result
        own = lane % OUT_ROWS
        first_row = warp * OUT_ROWS
        eight = cute.make_rmem_tensor((4,), Uint32)
        for first in cutlass.range_constexpr(0, self.value_dim, OUT_COLUMNS):
            for pair in cutlass.range_constexpr(OUT_COLUMNS // 16):
                places = [first // 2 + 8 * pair + 2 * i for i in range(4)]
                words = [pack(o[i] * inverse[i // 2 % 2], o[i + 1] * inverse[i // 2 % 2], self.dtype) for i in places]
                # Lanes 0 to 15 have the rows of the even chunk, the others those of the odd one.
                store_matrices(staged + own * 128 + ((2 * pair + lane // OUT_ROWS) ^ (own % 8)) * 16, words)
            cute.arch.sync_warp()
            for i in cutlass.range_constexpr(0, OUT_ROWS * OUT_COLUMNS // 8, 32):
                r, chunk = (i + lane) // 8, (i + lane) % 8
                if first_row + r < row_count:
                    loaded = load_16(staged + r * 128 + (chunk ^ (r % 8)) * 16)
                    for j in cutlass.range_constexpr(4):
                        eight[j] = loaded[j]
                    row = out[query + first_row + r, head, None]
                    cute.autovec_copy(
                        cute.recast_tensor(eight, self.dtype), cute.local_tile(row, (8,), (first // 8 + chunk,))
                    )
            cute.arch.sync_warp()


def head_load(x: cute.Tensor, layout: cute.ComposedLayout, shape: tuple[int, int]) -> tuple[cute.CopyAtom, cute.Tensor]:
    """The TMA load of `shape` of a head of x [T, H, D] into one stage of `layout`, and x as it takes it: [T, D, H]."""
    by_head = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1]))
    load = cute.nvgpu.cpasync.CopyBulkTensorTileG2SOp()
    info = cute.nvgpu.cpasync.make_tiled_tma_atom(load, by_head, cute.slice_(layout, (None, None, 0)), shape)
    return info[0], info[1]


@cute.jit
def blocks_of(atom: cute.CopyAtom, x: cute.Tensor, shared: cute.Tensor, row, head, shape: cutlass.Constexpr):
    """Shared memory [., stage] and the blocks [., n] of a head's rows from `row` on, as the TMA load takes them."""
    blocks = cute.local_tile(cute.domain_offset((row, 0), x[None, None, head]), shape, (None, 0))
    return cute.nvgpu.cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 2), cute.group_modes(blocks, 0, 2)
    )


@cute.jit
def release(barrier: cute.Pointer):
    """One arrival for the warp."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


@cached
def compile_attention_forward(dtype: str, config: AttentionConfig):
    """-> f(q [Tq, H, d], k [Tk, Hk, d], v [Tk, Hk, dv], cu_q [B + 1] int32, cu_k [B + 1] int32, out [Tq, H, dv], lse
    [H, Tq] fp32, counter [1] int32 of 0, scale * log2(e), causal, group, ctas); Tq, Tk > 0, scale > 0.

    Rows of q, k, v and out start at multiples of 16 bytes. group: heads whose tiles are taken together; a multiple of
    H / Hk.
    """
    kind = cute_dtype(dtype)
    queries, keys, heads, kv_heads, batch = (cute.sym_int() for _ in range(5))

    def fake(dtype, shape, stride, align):
        return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=align)

    def rows(*shape):
        return fake(kind, shape, (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1), 16)

    return compile_sm90(
        AttentionForwardSm90(kind, config),
        rows(queries, heads, config.dim),
        rows(keys, kv_heads, config.dim),
        rows(keys, kv_heads, config.value_dim),
        *(fake(Int32, (batch,), (1,), 4) for _ in range(2)),
        rows(queries, heads, config.value_dim),
        fake(Float32, (heads, queries), (cute.sym_int64(), 1), 4),
        fake(Int32, (1,), (1,), 4),
        *(Float32(0.0), Int32(0), Int32(0), Int32(1)),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    )


CONFIGS = {
    (64, 64): AttentionConfig(64, 64, groups=3, q_slots=2, held=False),
    (128, 128): AttentionConfig(128, 128, groups=2, q_slots=2, held=False),
    (192, 128): AttentionConfig(192, 128, groups=2, q_slots=1, held=True),
}


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_attention_forward, (dtype, config)) for dtype in ("bfloat16", "float16") for config in CONFIGS.values()
    ]
