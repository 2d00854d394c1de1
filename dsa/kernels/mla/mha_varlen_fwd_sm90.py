"""Multi-head attention forward over packed (varlen) sequences, with LSE.

out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, h']) v[j, h'],  h' = h // (H / Hk)

The sum runs over the keys j that query t sees. With a selection, it skips the keys that are not selected. H is the
number of query heads, Hk that of KV heads.

Warp roles
- Two or three consumer warpgroups. Each computes 64 query rows of the work tile, for one head.
- Three producer warps (mha_producer.py). LOAD loads Q, K and V by TMA. SCHEDULE computes work tiles. CLEAR
  zero-fills the V rows past the end of a sequence, because 0 * NaN is NaN.
Scheduler: dynamic persistent (mha_producer.py). The `group` query heads of a group have adjacent work tiles, so that
the K and V of their KV heads stay in the L2 cache. Within a sequence and group, the work tiles with the most keys come
first.
Pipelines: Q, K, V and work tiles, from the producer warps to the consumer warpgroups.
Mainloop
- A consumer warpgroup walks the KV blocks from last to first, so that the blocks that need a mask come
  first.
- It issues S = Q K^T of a block together with O += P V of the previous block. The softmax of the block
  overlaps with that O += P V.
- Consumer warpgroups issue their wgmmas in turns, ordered by named barriers.
- The last O += P V of a work tile is issued together with the first S = Q K^T of the next work tile, so that the tensor
  cores do not idle between work tiles.
- The true maximum can exceed row_max by up to RESCALE_THRESHOLD, in log2 (a factor of 2^8). O and row_sum are rescaled
  only if the true maximum exceeds row_max by more.
Selection: one bit per key (selection_bits_sm90.py). In a block of 128 keys a lane has 32 scores of a row, whose bits
are one word; in a block of 64 keys it has 16 scores, whose bits are half a word. ptxas can place the load of the next
block's word between the exponentials of the current block. The bits become predicates, seven at a time, for the
maxima and the exponentials (mha_consumer.py).
Epilogue: O goes through shared memory, so that rows are stored 128 contiguous bytes at a time
(mha_consumer.py).
Shared memory: q_stages x rows x D elements of Q, two stages of 128 keys (64 for D = 256) and of their values, 2 KiB
per consumer warp for the epilogue, barriers.
Registers per consumer thread, for 128 keys: 64 of S, 32 of P, DV / 2 of O. The budget is 240 with two consumer
warpgroups and 160 with three. For D = 192, Q is in registers, too (q_rmem): wgmma then reads less shared memory, and
the consumers release the only stage of Q after the work tile's first block.
Roofline: bound by power. At 4096 FLOP per cycle and SM an H200 lowers its clock to 1.5 GHz. cuBLAS has the same limit,
and this kernel reaches 90% of the rate of cuBLAS's bf16 GEMM. Shared memory delivers 112 of at most 128 bytes per cycle
(D = DV = 128).
"""

import itertools
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from dsa.cute.copies import tile_load
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import cute_dtype, fake, fake_stream, strides
from dsa.cute.pipeline import Pipeline, pipeline_storage, start
from dsa.cute.shared_memory import load_matrices, pack
from dsa.cute.sm90 import SHARED_BYTES, WARPGROUP
from dsa.cute.tile_counter import fake_tile_counter
from dsa.cute.work_tile import work_tile_storage
from dsa.kernels.mla.limits import DTYPES, ROPE_DIMS, SELECTION_KEYS, SELECTION_WORDS
from dsa.kernels.mla.mha_consumer import (
    after,
    bit_mask,
    load_word,
    low_bits,
    max_all,
    max_selected,
    places,
    store_rows,
)
from dsa.kernels.mla.mha_producer import (
    OUT_COLUMNS,
    OUT_ROWS,
    STAGES,
    MhaConfig,
    MhaPipelines,
    MhaProducer,
    MhaScheduler,
    WorkTileInfo,
)
from dsa.kernels.mla.mla_softmax import NO_MAX, raise_row_max
from dsa.kernels.mla.mla_tiles import tiled_mma
from dsa.runtime.compile_cache import cached, compile_sm90

REGISTERS = {2: (240, 24), 3: (160, 32)}  # {consumer warpgroups: registers per (consumer thread, producer thread)}


class ProducerRole(IntEnum):
    """The producer warps, numbered from the first warp after the consumer warps."""

    LOAD = 0
    SCHEDULE = 1
    CLEAR = 2


TURN = 1  # named barrier TURN + i lets consumer warpgroup i issue its wgmmas


class MhaVarlenFwdSm90(MhaProducer):
    def __init__(self, dtype: type[cutlass.Numeric], cfg: MhaConfig, rope: int, selected: bool):
        super().__init__(dtype, cfg, rope)
        self.selected, self.consumer_warps = selected, 4 * cfg.warpgroups

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        k_rope: cute.Tensor | None,
        v: cute.Tensor,
        cu_q: cute.Tensor,
        cu_k: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sinks: cute.Tensor | None,
        bits: cute.Tensor | None,
        dense_keys: Int32 | None,
        tile_counter: cute.Tensor,
        scale: Float32,
        causal: Int32,
        group: Int32,
        ctas: Int32,
        stream,
    ):
        tile = self.rows, self.keys, self.dim
        q_layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.dtype, self.cfg.q_stages)
        k_layout, v_layout = self.block_layout(self.dim), self.block_layout(self.value_dim)
        parts = [
            (q, q_layout, (self.rows, self.dim)),
            (k, self.block_layout(self.dim - self.rope), (self.keys, self.dim - self.rope)),
            (v, v_layout, (self.keys, self.value_dim)),
        ]
        if const_expr(self.rope > 0):
            parts.append((k_rope, self.block_layout(self.rope), (self.keys, self.rope)))
        loads = []
        for x, layout, shape in parts:
            by_head = cute.make_tensor(x.iterator, cute.select(x.layout, mode=[0, 2, 1]))
            loads.append(tile_load(by_head, layout, shape))

        @cute.struct
        class Storage:
            q_barriers: pipeline_storage(self.cfg.q_stages)
            k_barriers: pipeline_storage(STAGES)
            v_barriers: pipeline_storage(STAGES)
            v_loaded: cute.struct.MemRange[Int64, STAGES]
            work_tiles: work_tile_storage(WorkTileInfo)
            out: cute.struct.Align[cute.struct.MemRange[Int32, self.consumer_warps * OUT_ROWS * OUT_COLUMNS // 2], 1024]
            q: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(q_layout)], 1024]
            k: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(k_layout)], 1024]
            v: cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(v_layout)], 1024]

        assert Storage.size_in_bytes() <= SHARED_BYTES
        self.storage = Storage
        self.kernel(
            *(loads, cu_q, cu_k, out, lse, sinks, bits, dense_keys, tile_counter, scale, causal, group),
            *(q.shape[1] // k.shape[1], q_layout, k_layout, v_layout),
        ).launch(
            grid=(ctas, 1, 1),
            block=((self.cfg.warpgroups + 1) * WARPGROUP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        loads: list,
        cu_q: cute.Tensor,
        cu_k: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        sinks: cute.Tensor | None,
        bits: cute.Tensor | None,
        dense_keys: Int32 | None,
        tile_counter: cute.Tensor,
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
        parts = (storage.q, q_layout), (storage.k, k_layout), (storage.v, v_layout)
        shared = [memory.get_tensor(layout.outer, swizzle=layout.inner) for memory, layout in parts]
        if warp == self.consumer_warps + ProducerRole.LOAD:
            for atom, _ in loads:
                cute.nvgpu.cpasync.prefetch_descriptor(atom)
        if tid == 0:
            MhaPipelines.of(storage, self.cfg.q_stages).init(self.consumer_warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        wait_for_prerequisite_grids()
        consumer_registers, producer_registers = REGISTERS[self.cfg.warpgroups]
        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(producer_registers)
            if warp == self.consumer_warps + ProducerRole.LOAD:
                self.load(storage, loads, shared)
            elif warp == self.consumer_warps + ProducerRole.SCHEDULE:
                scheduler = MhaScheduler(
                    *(cu_q, cu_k, tile_counter, Int32(out.shape[1]), group, ratio, causal),
                    *(Int32(out.shape[0]), Int32(loads[1][1].shape[0])),
                    *(self.rows, self.keys),
                )
                scheduler.run(MhaPipelines.of(storage, self.cfg.q_stages).work_tiles, lane)
            elif warp == self.consumer_warps + ProducerRole.CLEAR:
                self.clear(storage, shared[2], lane)
        else:
            cute.arch.setmaxregister_increase(consumer_registers)
            self.consume(storage, (out, lse, sinks), (bits, dense_keys), scale, shared, tid, warp, lane)

    def block_layout(self, channels: int) -> cute.ComposedLayout:
        """Return the shared-memory layout of all stages of K or V, with `channels` channels, a multiple of 64."""
        shape = self.rows, self.keys, channels
        return sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, self.dtype, STAGES)

    def score_mma(self) -> cute.TiledMma:
        return tiled_mma(self.dtype, "K K", (64, self.keys), self.cfg.q_rmem, self.cfg.warpgroups)

    def value_mma(self) -> cute.TiledMma:
        return tiled_mma(self.dtype, "K MN", (64, self.value_dim), True, self.cfg.warpgroups)

    @cute.jit
    def consume(self, storage, results, selection, scale, shared: list, tid, warp, lane):
        (sq, sk, sv), score_mma, value_mma = shared, self.score_mma(), self.value_mma()
        score_thr, value_thr = score_mma.get_slice(tid), value_mma.get_slice(tid)
        v_by_channel = cute.make_tensor(sv.iterator, cute.select(sv.layout, mode=[1, 0, 2]))
        if const_expr(self.cfg.q_rmem):
            rq = cute.make_rmem_tensor(score_thr.partition_shape_A((self.rows, self.dim)), self.dtype)
        else:
            rq = score_mma.make_fragment_A(score_thr.partition_A(sq))
        rk = score_mma.make_fragment_B(score_thr.partition_B(sk))
        rv = value_mma.make_fragment_B(value_thr.partition_B(v_by_channel))
        scores = cute.make_rmem_tensor(score_thr.partition_shape_C((self.rows, self.keys)), Float32)
        sums = cute.make_rmem_tensor(value_thr.partition_shape_C((self.rows, self.value_dim)), Float32)
        powers = cute.make_rmem_tensor(value_thr.partition_shape_A((self.rows, self.keys)), self.dtype)
        s = cute.make_tensor(scores.iterator, cute.make_layout(self.keys // 2))
        o = cute.make_tensor(sums.iterator, cute.make_layout(self.value_dim // 2))
        p = cute.make_tensor(cute.recast_ptr(powers.iterator, dtype=Uint32), cute.make_layout(self.keys // 4))
        row_max, row_sum, factor = [cute.make_rmem_tensor((2,), Float32) for _ in range(3)]
        value_mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, True)
        warpgroup, own_row = warp // 4, warp * 16 + (lane >> 2)
        words, addresses = cute.make_rmem_tensor((2,), Int32), cute.make_rmem_tensor((2,), Int64)
        pipelines = MhaPipelines.of(storage, self.cfg.q_stages)
        queries, keys, values, work_tiles = pipelines.q, pipelines.k, pipelines.v, pipelines.work_tiles
        staged = storage.out.data_ptr().toint() + warp * (OUT_ROWS * OUT_COLUMNS * 2)
        # Prologue: S = Q K^T of the first work tile's first block, for which the warpgroups take no turns. The last
        # warpgroup passes the first turn of the mainloop to warpgroup 0.
        if warpgroup == self.cfg.warpgroups - 1:
            self.pass_turn(warpgroup)
        tile_state, q_state, k_state, v_state = start(), start(), start(), start()
        blocks = work_tiles.current(tile_state).blocks
        known = self.await_first_block(
            *(blocks, pipelines, tile_state, q_state, k_state, selection, words, addresses),
            *(own_row, warpgroup, lane),
        )
        self.load_q(rq, sq, q_state.stage, warp, lane)
        cute.nvgpu.warpgroup.fence()
        self.issue_scores(scores, rq, rk, q_state.stage, k_state.stage)
        cute.nvgpu.warpgroup.wait_group(0)
        while blocks > 0:
            # Here S of this work tile's first block is complete.
            keys.consumer_release(k_state)
            k_state = keys.advance(k_state)
            if self.cfg.q_rmem or blocks == 1:
                queries.consumer_release(q_state)
            work_tile = work_tiles.read(tile_state)
            clear = cutlass.min(work_tile.key_count, work_tile.first + 64 * warpgroup)
            key = (blocks - 1) * self.keys
            row_max.fill(NO_MAX)
            row_sum.fill(0.0)
            o.fill(0.0)
            if const_expr(self.selected):
                self.cut_words(words, clear, key, work_tiles, tile_state, own_row, lane)
            else:
                self.cut_scores(s, clear, key, work_tiles, tile_state, own_row, lane)
            self.softmax(s, row_max, row_sum, factor, key, scale, words)
            if const_expr(self.selected):
                self.load_words(words, addresses, known, key - self.keys)
            self.pack_powers(s, p)
            # Mainloop: S of a block, and O += P V of the previous block.
            for _ in cutlass.range(blocks - 1, unroll=1):
                key -= self.keys
                keys.consumer_wait(k_state)
                self.take_turn(warpgroup)
                self.issue_products(scores, rq, rk, q_state, k_state, value_mma, sums, powers, rv, values, v_state)
                self.pass_turn(warpgroup)
                if const_expr(self.selected):
                    self.cut_words(words, clear, key, work_tiles, tile_state, own_row, lane)
                cute.nvgpu.warpgroup.wait_group(1)
                keys.consumer_release(k_state)
                k_state = keys.advance(k_state)
                if const_expr(not self.cfg.q_rmem):
                    if key == 0:
                        queries.consumer_release(q_state)
                if const_expr(not self.selected):
                    self.cut_scores(s, clear, key, work_tiles, tile_state, own_row, lane)
                rose = self.softmax(s, row_max, row_sum, factor, key, scale, words)
                # Load the next block's words. ptxas can place this load between the exponentials of the softmax above
                # (see `load_word`), where it costs no time.
                if const_expr(self.selected):
                    self.load_words(words, addresses, known, key - self.keys)
                # Wait inside each branch. If there were one wait before the branch, ptxas would move it up, before
                # most of the exponentials.
                if rose:
                    cute.nvgpu.warpgroup.wait_group(0)
                    for i in cutlass.range_constexpr(self.value_dim // 2):
                        o[i] *= factor[i // 2 % 2]
                else:
                    cute.nvgpu.warpgroup.wait_group(0)
                values.consumer_release(v_state)
                v_state = values.advance(v_state)
                self.pack_powers(s, p)
            # The last O += P V, and S of the next work tile's first block.
            last = tile_state
            tile_state = work_tiles.pipeline.advance(tile_state)
            blocks = work_tiles.current(tile_state).blocks
            q_state = queries.advance(q_state)
            known = self.await_first_block(
                *(blocks, pipelines, tile_state, q_state, k_state, selection, words, addresses),
                *(own_row, warpgroup, lane),
            )
            self.load_q(rq, sq, q_state.stage, warp, lane)
            self.take_turn(warpgroup)
            # After the last work tile, S is computed from stale shared memory and is never read.
            self.issue_products(scores, rq, rk, q_state, k_state, value_mma, sums, powers, rv, values, v_state)
            self.pass_turn(warpgroup)
            cute.nvgpu.warpgroup.wait_group(0)
            values.consumer_release(v_state)
            v_state = values.advance(v_state)
            store_rows(
                *(o, row_max, row_sum, *results, work_tiles.read(last), staged, own_row, warp, lane, self.cfg.q_rmem)
            )
            work_tiles.release(last)

    @cute.jit
    def await_first_block(
        self,
        blocks,
        pipelines: MhaPipelines,
        tile_state,
        q_state,
        k_state,
        selection,
        words,
        addresses,
        own_row,
        warpgroup,
        lane,
    ):
        """Wait for a work tile's Q and first block of K, and load the block's selection words.

        Return the result of `find_words`.
        """
        known = Int32(0)
        if blocks > 0:
            pipelines.q.consumer_wait(q_state)
            pipelines.k.consumer_wait(k_state)
        if const_expr(self.selected):
            known = self.find_words(
                addresses, selection, pipelines.work_tiles.read(tile_state), own_row, warpgroup, lane
            )
            self.load_words(words, addresses, known, (blocks - 1) * self.keys)
        return known

    @cute.jit
    def take_turn(self, warpgroup):
        cute.arch.barrier(barrier_id=TURN + warpgroup, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def pass_turn(self, warpgroup):
        following = 0 if warpgroup == self.cfg.warpgroups - 1 else warpgroup + 1
        cute.arch.barrier_arrive(barrier_id=TURN + following, number_of_threads=2 * WARPGROUP)

    @cute.jit
    def load_q(self, rq, sq, stage, warp, lane):
        """Load the warp's 16 rows of Q from shared memory to registers, if `q_rmem`."""
        if const_expr(self.cfg.q_rmem):
            words = cute.make_tensor(cute.recast_ptr(rq.iterator, dtype=Uint32), cute.make_layout((4, self.dim // 16)))
            row = warp * 16 + lane % 16
            start = Int32(sq.iterator.toint()) + stage * (self.rows * self.dim * 2) + row * 128
            for step in cutlass.range_constexpr(self.dim // 16):
                chunk = (step % 4 * 2 + lane // 16) ^ (row % 8)
                for i, word in enumerate(load_matrices(start + step // 4 * (self.rows * 128) + chunk * 16)):
                    words[i, step] = word

    @cute.jit
    def issue_products(self, scores, rq, rk, q_state, k_state, value_mma, sums, powers, rv, values: Pipeline, v_state):
        """Issue S = Q K^T of stage `k_state`, wait for V of stage `v_state`, and issue O += P V."""
        cute.nvgpu.warpgroup.fence()
        self.issue_scores(scores, rq, rk, q_state.stage, k_state.stage)
        values.consumer_wait(v_state)
        for step in cutlass.range_constexpr(self.keys // 16):
            cute.gemm(value_mma, sums, powers[None, None, step], rv[None, None, step, v_state.stage], sums)
        cute.nvgpu.warpgroup.commit_group()

    @cute.jit
    def issue_scores(self, scores, rq, rk, q_stage, k_stage):
        mma = self.score_mma()  # a new TiledMma, because one whose field is set in a loop is unusable after the loop
        for step in cutlass.range_constexpr(self.dim // 16):
            mma.set(cute.nvgpu.warpgroup.Field.ACCUMULATE, step > 0)
            place = (None, None, step) if self.cfg.q_rmem else (None, None, step, q_stage)
            cute.gemm(mma, scores, rq[place], rk[None, None, step, k_stage], scores)
        cute.nvgpu.warpgroup.commit_group()

    @cute.jit
    def softmax(self, s, row_max, row_sum, factor, key, scale, words):
        """Overwrite the scores of a block, whose first key is `key`, with P, and update row_max and row_sum.

        Set `factor` to the factors by which O must be multiplied, and return whether a factor of any lane is not 1.
        With `selected`, `words` has the selection bits of the lane's two rows.
        """
        rose = raise_row_max(row_max, row_sum, factor, [value * scale for value in self.maxima(s, words)])
        if const_expr(self.selected):
            self.selected_powers(s, row_max, row_sum, scale, words, key >> 31)
        else:
            for i in cutlass.range_constexpr(self.keys // 2):
                s[i] = cute.math.exp2(cute.math.fma(s[i], scale, -row_max[i // 2 % 2]), fastmath=True)
            for i in cutlass.range_constexpr(self.keys // 2):
                row_sum[i // 2 % 2] += s[i]
        return rose

    def maxima(self, s, words):
        """Return the highest score of each of the lane's two rows. With `selected`, only keys whose bits are set
        count."""
        chains = [(), ()]
        for byte, r in itertools.product(range(self.keys // 32), range(2)):
            eight = [s[i] for i in places(byte, r)]
            chains[r] = max_selected(chains[r], eight, words[r], byte) if self.selected else max_all(chains[r], eight)
        highest = [cute.arch.fmax(*chain) for chain in chains]
        for offset in (1, 2):
            others = [cute.arch.shuffle_sync_bfly(value, offset=offset) for value in highest]
            highest = [cute.arch.fmax(value, other) for value, other in zip(highest, others)]
        return highest

    @cute.jit
    def selected_powers(self, s, row_max, row_sum, scale, words, zero):
        """Overwrite the scores `s` with P, which is 0 for unselected keys, and add P to row_sum. zero: 0, unknown to
        ptxas.

        `after` makes the masks depend on earlier results. Without this dependency ptxas keeps all predicates live from
        the maxima on, and masks all scores before the first exponential.
        """
        own, before = cute.make_rmem_tensor((2,), Int32), cute.make_rmem_tensor((2,), Float32)
        for byte in cutlass.range_constexpr(self.keys // 32):
            for r in cutlass.range_constexpr(2):
                ready = row_max[r] if byte == 0 else s[2 * r] if byte == 1 else before[r]
                own[r] = after(words[r] if byte == 0 else own[r], ready, zero)
                before[r] = row_sum[r]
                for bit, i in enumerate(places(byte, r)):
                    s[i] = cute.math.fma(s[i], scale, -row_max[r])
                    if own[r] & bit_mask(byte, bit) == 0:
                        s[i] = -Float32(float("inf"))
                    s[i] = cute.math.exp2(s[i], fastmath=True)
                for i in places(byte, r):
                    row_sum[r] += s[i]

    @cute.jit
    def cut_scores(self, s, clear, key, work_tiles, tile_state, own_row, lane):
        """In the block that begins at `key`, set the scores of keys that the lane's rows do not see to -inf.

        All rows of the warpgroup see the first `clear` keys, so blocks that end at or before `clear` need no mask.
        """
        if key + self.keys > clear:
            seen = self.seen_keys(work_tiles, tile_state, own_row, lane)
            for i in cutlass.range_constexpr(self.keys // 2):
                if seen[i // 2 % 2] - key <= i // 4 * 8 + i % 2:
                    s[i] = -Float32(float("inf"))

    @cute.jit
    def cut_words(self, words, clear, key, work_tiles, tile_state, own_row, lane):
        """Clear the selection bits of keys that the lane's rows do not see; `clear` is as in `cut_scores`.

        A word has two bits per eight keys: the bits of the lane's two columns. The columns that row r sees come first,
        so their bits are the lowest.
        """
        if key + self.keys > clear:
            seen = self.seen_keys(work_tiles, tile_state, own_row, lane)
            for r in cutlass.range_constexpr(2):
                count = cutlass.max(seen[r] - key, 0)
                words[r] = words[r] & low_bits((count >> 3) * 2 + cutlass.min(count & 7, 2))

    @cute.jit
    def seen_keys(self, work_tiles, tile_state, own_row, lane):
        """Return for each of the lane's two rows the number of keys that it sees, minus the lane's first column.

        So the caller can compare it with the same constants in all lanes. The work tile is read again from shared
        memory, to save registers.
        """
        work_tile = work_tiles.read(tile_state)
        seen = [cutlass.min(work_tile.key_count, work_tile.first + own_row + 8 * r) for r in range(2)]
        return [count - 2 * (lane & 3) for count in seen]

    @cute.jit
    def find_words(self, addresses, selection, work_tile: WorkTileInfo, own_row, warpgroup, lane) -> Int32:
        """Set `addresses` to the address of the lane's first selection word in each of the lane's two rows of `bits`.

        Return the number of keys for which `load_words` must read selection words. If every row of the warpgroup
        sees at most `dense_keys` keys, all these keys are selected and the number is 0. Otherwise it is the number
        of keys that a row of `bits` covers.
        """
        bits, dense_keys = selection
        for r in cutlass.range_constexpr(2):
            # Rows past the end of the sequence use the words of the sequence's last row.
            row = work_tile.query + cutlass.min(own_row + 8 * r, work_tile.row_count - 1)
            addresses[r] = bits.iterator.toint() + (Int64(row) * bits.shape[1] + (lane & 3)) * 4
        most = cutlass.min(work_tile.key_count, work_tile.first + 64 * warpgroup + 63)
        known = bits.shape[1] * (SELECTION_KEYS // SELECTION_WORDS)
        return known if most > dense_keys else Int32(0)

    @cute.jit
    def load_words(self, words, addresses, known, key):
        """Load the selection words of the block that begins at `key`, for the lane's two rows.

        If `key` is outside [0, known), set all bits and load nothing.
        """
        place = Uint32(key) // SELECTION_KEYS * (4 * SELECTION_WORDS)
        if const_expr(self.keys < SELECTION_KEYS):
            place += Uint32(key) % SELECTION_KEYS // 32
        for r in cutlass.range_constexpr(2):
            words[r] = load_word(addresses[r] + Int64(place), key, known, self.keys // 4)

    @cute.jit
    def pack_powers(self, s, p):
        for i in cutlass.range_constexpr(self.keys // 4):
            p[i] = pack(s[2 * i], s[2 * i + 1], self.dtype)


@cached
def compile_mha_varlen_fwd(dtype: str, config: MhaConfig, rope: int, selected: bool, sinks: bool):
    """Compile f(q [Tq, H, d], k [Tk, Hk, d - rope], k_rope [Tk, 1, rope] or None if rope is 0, v
    [Tk, Hk, dv], cu_q [B + 1] int32, cu_k [B + 1] int32, out [Tq, H, dv], lse [H, Tq] fp32, sinks [H] fp32 if `sinks`
    or None, bits [Tq, words] int32 if `selected` or None, dense_keys or None, tile_counter [1] int32, scale * log2(e),
    causal, group, ctas).

    d and dv are those of `config`. Tq, Tk > 0; scale > 0; tile_counter is 0 at launch. Rows of 16-bit tensors start at
    multiples of 16 bytes.

    bits        from selection_bits_sm90.py, with enough words per row for the longest sequence of keys
    dense_keys  a warpgroup whose rows see at most `dense_keys` keys does not read `bits`: all these keys are selected
    causal      > 0: the last query of a sequence sees all keys of the sequence, and each query one key less than the
                next query. Otherwise all queries see all keys
    group       number of query heads, a multiple of H / Hk, whose work tiles are scheduled together
    ctas        number of CTAs to launch
    """
    kind = cute_dtype(dtype)
    queries, keys, heads, kv_heads, batch = (cute.sym_int() for _ in range(5))

    def rows(*shape):
        return fake(kind, shape, (*strides(2, 8), 1))

    return compile_sm90(
        MhaVarlenFwdSm90(kind, config, rope, selected),
        rows(queries, heads, config.dim),
        rows(keys, kv_heads, config.dim - rope),
        rows(keys, 1, rope) if rope else None,
        rows(keys, kv_heads, config.value_dim),
        *(fake(Int32, (batch,), (1,), 4) for _ in range(2)),
        rows(queries, heads, config.value_dim),
        fake(Float32, (heads, queries), (*strides(1), 1), 4),
        fake(Float32, (heads,), (1,), 4) if sinks else None,
        fake(Int32, (queries, cute.sym_int()), (*strides(1), 1), 4) if selected else None,
        Int32(0) if selected else None,
        fake_tile_counter(),
        *(Float32(0.0), Int32(0), Int32(0), Int32(1), fake_stream()),
    )


CONFIGS = {
    (64, 64): MhaConfig(64, 64, keys=128, warpgroups=3, q_stages=2, q_rmem=False),
    (128, 128): MhaConfig(128, 128, keys=128, warpgroups=2, q_stages=2, q_rmem=False),
    (192, 128): MhaConfig(192, 128, keys=128, warpgroups=2, q_stages=1, q_rmem=True),
    (256, 256): MhaConfig(256, 256, keys=64, warpgroups=2, q_stages=1, q_rmem=False),
}


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the ops can ask for."""
    ropes = {config: {0, ROPE_DIMS.get(dims, 0)} for dims, config in CONFIGS.items()}
    kinds = [(config, rope) for config in ropes for rope in sorted(ropes[config])]
    every = itertools.product(DTYPES, kinds, (False, True), (False, True))
    return [(compile_mha_varlen_fwd, (dtype, *kind, selected, sinks)) for dtype, kind, selected, sinks in every]
