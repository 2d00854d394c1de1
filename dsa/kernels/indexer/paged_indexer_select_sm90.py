"""Lightning-indexer scores over a paged key cache, and the k largest of each query, in one kernel.

out[b n + i] = the keys s of the k largest of kscale[b, s] * sum_h w[b n + i, h] * relu(q[b, i, h] . k[b, s]), of equal
ones the first, in ascending order

Plan
- A CTA has a part of one sequence's keys, for all of its queries: a sequence gets as many CTAs as its length asks for.
  Every warp finds its CTA's part from the lengths by itself.
- Scores as fp8_paged_mqa_logits_sm90.py computes them, by the same producer and consumer warps, but for where they go:
  to shared memory, where they stay. Keys that a query does not see are NaN there.
- The consumer warpgroups then select (selection_over_ctas.py): two meetings of a sequence's CTAs in global memory, or
  up to four, where counts of digits and a short list of scores are all that is written.
Shared memory: barriers, N x (D + 4 or, of half scores, 8) bytes of queries and weights, GROUPS x STAGES x 64 x (D + 4)
of keys, in whose place the selection has its own later, and for each query `capacity` scores.
Registers: as of fp8_paged_mqa_logits_sm90.py.
Constraints: all CTAs run at once. A launch takes up to 32 sequences, whose scores fit the multiprocessors' shared
memory (paged_select_plan.py).
Roofline: memory, as the scores alone, and 8 to 10 microseconds behind them.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.cute.pipeline import Pipeline, expect_bytes, pipeline_storage, start
from dsa.cute.reductions import warp_inclusive_scan
from dsa.cute.sm90 import SHARED_BYTES, WARP, WARPGROUP
from dsa.kernels.indexer.limits import HEAD_DIMS, HEADS, NEXT_N, PAGE_SIZES
from dsa.kernels.indexer.paged_mqa_logits_config import bound_by_arithmetic
from dsa.kernels.indexer.paged_score_tiles import PagedScoreTiles, Pipelines
from dsa.kernels.indexer.paged_select_plan import BINS, ROW_WORDS, PagedSelectConfig, choose_config
from dsa.kernels.indexer.score_tile import TILE, score_mma
from dsa.kernels.indexer.selection_over_ctas import (
    FOUND_WORDS,
    SMALL_WORDS,
    Group,
    SelectionMemory,
    SelectionOverCtas,
)
from dsa.runtime.compile_cache import cached, compile_sm90


class PagedIndexerSelectSm90(PagedScoreTiles):
    def __init__(self, heads: int, dim: int, next_n: int, page_size: int, half: bool, cfg: PagedSelectConfig):
        super().__init__(heads, dim, next_n, page_size, Float32, half, cfg.groups, cfg.stages, sequences=1)
        self.capacity = cfg.capacity(self.n, next_n, half)
        assert self.capacity < 1 << 16  # two counts of a CTA's keys are in one number
        self.selection = SelectionOverCtas(cfg.groups * WARPGROUP, next_n, page_size)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        cache: cute.Tensor,
        weights: cute.Tensor,
        lengths: cute.Tensor,
        block_table: cute.Tensor,
        workspace: cute.Tensor,
        indices: cute.Tensor,
        values: cute.Tensor,
        capacity: Int32,
        options: Int32,
        ctas: Int32,
        stream,
    ):
        (q_atom, q_tma, k_atom, k_tma), (q_layout, k_layout, page_layout) = self.loads(q, cache)

        teams = self.selection.teams

        @cute.struct
        class Storage:
            k_pipeline: pipeline_storage(self.stages)
            q_pipeline: pipeline_storage(1)
            # Of a key tile: one bit for each of its pages that is in the cache.
            valid_pages: cute.struct.MemRange[Uint32, self.stages]
            found: cute.struct.MemRange[Int32, FOUND_WORDS * self.next_n]
            selection: cute.struct.Align[cute.struct.MemRange[Int32, 4 + SMALL_WORDS * teams], 16]
            weights: cute.struct.Align[cute.struct.MemRange[Float32, self.n], 128]
            # Of half scores: the powers of two that the rows of queries were divided by.
            powers: cute.struct.MemRange[Float32, self.n if self.half else 0]
            scales: cute.struct.Align[cute.struct.MemRange[Float32, TILE * self.stages], 128]
            q: cute.struct.Align[cute.struct.MemRange[Float8E4M3FN, cute.cosize(q_layout)], 1024]
            # And in its place what the selection has of each team.
            k: cute.struct.Align[
                cute.struct.MemRange[Float8E4M3FN, max(cute.cosize(k_layout), 4 * BINS[0] * teams)], 1024
            ]
            scores: cute.struct.Align[cute.struct.MemRange[Float32, self.capacity * self.next_n], 16]

        assert Storage.size_in_bytes() <= SHARED_BYTES
        self.storage = Storage
        self.kernel(
            *(q_atom, q_tma, k_atom, k_tma, cache, weights, lengths, block_table, workspace, indices, values),
            *(capacity, options, score_mma(self.n, self.accumulators), q_layout, k_layout, page_layout),
        ).launch(
            grid=(ctas, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
            cooperative=True,  # CTAs wait for each other
        )

    @cute.kernel
    def kernel(
        self,
        q_atom: cute.CopyAtom,
        mq: cute.Tensor,
        k_atom: cute.CopyAtom,
        mk: cute.Tensor,
        cache: cute.Tensor,
        weights: cute.Tensor,
        lengths: cute.Tensor,
        block_table: cute.Tensor,
        workspace: cute.Tensor,
        indices: cute.Tensor,
        values: cute.Tensor,
        capacity: Int32,
        options: Int32,
        mma: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        k_layout: cute.ComposedLayout,
        page_layout: cute.ComposedLayout,
    ):
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        storage = SmemAllocator().allocate(self.storage)
        pipelines = Pipelines(k=Pipeline.of(storage.k_pipeline, self.stages), q=Pipeline.of(storage.q_pipeline, 1))
        sq = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sk = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        spages = storage.k.get_tensor(page_layout.outer, swizzle=page_layout.inner)
        valid_pages = storage.valid_pages.get_tensor(cute.make_layout(self.stages))
        sweights = storage.weights.get_tensor(cute.make_layout((self.heads, self.next_n, 1)))
        scales = storage.scales.get_tensor(cute.make_layout((self.page, self.pages_a_tile * self.stages)))
        scores = storage.scores.get_tensor(cute.make_layout((self.capacity, self.next_n)))

        if warp == self.consumer_warps:
            cute.nvgpu.cpasync.prefetch_descriptor(q_atom)
            cute.nvgpu.cpasync.prefetch_descriptor(k_atom)
        if tid == 0:
            pipelines.k.init(consumers=WARPGROUP // WARP)
            pipelines.q.init(consumers=self.consumer_warps)
        cute.arch.mbarrier_init_fence()
        wait_for_prerequisite_grids()
        group, seen = self.own_part(lengths, capacity, lane)
        cute.arch.sync_threads()

        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(self.producer_registers)
            own = warp - self.consumer_warps
            if own < self.groups and group.tiles > 0:
                tqs, tqg = self.query_copies(q_atom, mq, sq)
                numbers = self.page_numbers(block_table, group.sequence, group.first + own, lane)
                if own == 0:
                    barrier = pipelines.q.producer_barrier(start())
                    with cute.arch.elect_one():
                        expect_bytes(barrier, self.n * (self.dim + 4))
                    queries = q_atom, tqg, tqs, self.weights_copy(), weights, sweights
                    self.load_queries(*queries, group.sequence, 0, barrier)
                copies = self.key_copies(k_atom, mk, cache, spages, valid_pages, scales, pipelines, own)
                work_tile = block_table, group.sequence, group.first, group.tiles, own
                self.load_tiles(copies, *work_tile, numbers, start(), lane)
        else:
            cute.arch.setmaxregister_increase(self.consumer_registers)
            if group.tiles > 0:
                scoring = self.scoring(mma, sq, sk, valid_pages, scales, pipelines, tid, warp, lane)
                pipelines.q.consumer_wait(start())
                self.take_weights(scoring, sq, sweights, Int32(storage.powers.data_ptr().toint()), 0, tid)
                rows = []
                for i in cutlass.range_constexpr(self.lane_rows):
                    row = self.lane_row(i, scoring)
                    limit = seen[min(2 * i + 1, self.next_n - 1)] if row > 2 * i else seen[2 * i]
                    # Keys are counted from this CTA's first here.
                    scoring.limits[i] = limit - group.first * TILE
                    rows.append(scores[None, row])
                self.score_tiles(mma, scoring, rows, 0, Int32(0), group.tiles, warp // 4, start())
            if group.members > 0:
                team, own = tid // self.selection.threads, tid % self.selection.threads
                keys = cute.recast_ptr(storage.k.data_ptr(), dtype=Int32)
                memory = SelectionMemory.of(
                    storage.found.data_ptr(), storage.selection.data_ptr(), keys, self.next_n, team
                )
                tables = workspace, block_table, indices, values, options
                self.selection.select(group, scores, *tables, memory, team, own)

    @cute.jit
    def own_part(self, lengths: cute.Tensor, capacity: Int32, lane):
        """(The CTA's part of the work, how many keys each query of its sequence sees.) 0 members: it has no work."""
        batch, longest = lengths.shape[0], Int32(0)
        limits = [Int32(0) for _ in range(self.next_n)]
        if lane < batch:
            for i in cutlass.range_constexpr(self.next_n):
                limits[i] = self.visible_keys(lengths, lane, i, capacity)
                longest = cutlass.max(longest, limits[i])
        tiles = cute.ceil_div(longest, TILE)
        total = cute.arch.warp_redux_sync(tiles, "add")
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        # A CTA for each sequence, one for each of its tiles at most, and the others by the tiles.
        members = Int32(0)
        if lane < batch:
            members = 1 + (ctas - batch) * tiles // cutlass.max(total, 1)
            members = cutlass.min(members, cutlass.max(tiles, 1))
        ends = warp_inclusive_scan(members, lane)
        behind = cute.arch.vote_ballot_sync(lane < batch and cta < ends)
        sequence = Int32(0)
        if behind != 0:
            sequence = Int32(cute.arch.popc((behind & -behind) - 1))
        own = cute.arch.shuffle_sync(members, sequence)
        member = cta - cute.arch.shuffle_sync(ends, sequence) + own
        of_all = cute.arch.shuffle_sync(tiles, sequence)
        seen = [cute.arch.shuffle_sync(limits[i], sequence) for i in range(self.next_n)]
        first = of_all * member // cutlass.max(own, 1)
        end = of_all * (member + 1) // cutlass.max(own, 1)
        # Without work: behind the last sequence's CTAs.
        works = behind != 0
        own, end = own if works else Int32(0), end if works else first
        return Group(sequence, member, own, first, end - first), seen

    @cute.jit
    def masked(self, result, masked_key, key, limit):
        """A key that the query does not see is NaN, which is never selected; 0 is not -0."""
        # Not by adding 0, which would make one operation of the product and the sum: that rounds to -0.
        result = Float32(0.0) if result == 0.0 else result
        if masked_key >= limit:
            result = -Float32(float("inf"))
        if key >= limit:
            result = Float32(float("nan"))
        return result


@cached
def compile_paged_indexer_select(
    heads: int, dim: int, next_n: int, page_size: int, half: bool, config: PagedSelectConfig
):
    """half: fp16 accumulators (half_scores).

    -> f(q [B * next_n * H, D] e4m3, cache [pages, P * (D + 4)] uint8, weights [B * next_n, H], lengths [B, 1 or
    next_n], block_table [B, max_pages], workspace [B * next_n, ROW_WORDS] int32, whose first ZERO_WORDS are zero,
    indices [B * next_n, k] int32, values [B * next_n, any] fp32, capacity, options, CTAs); 0 < B <= MAX_SEQUENCES,
    pages, max_pages > 0, and as many CTAs as run at once, at most MAX_CTAS, whose `config.capacity` has room for
    `capacity` keys of each sequence (`sequences_of_launch`). Pages and rows of weights start at multiples of 16 bytes.
    `options`: PAGED for cache slots in place of keys, VALUES."""
    batch, rows = cute.sym_int(), cute.sym_int()
    q = fake(Float8E4M3FN, (cute.sym_int(), dim), (dim, 1))
    cache = fake(cutlass.Uint8, (cute.sym_int(), page_size * (dim + 4)), (*strides(1, 16), 1))
    weights = fake(Float32, (rows, heads), (*strides(1, 4), 1))
    lengths = fake(Int32, (batch, cute.sym_int()), (*strides(1), 1), 4)
    block_table = fake(Int32, (batch, cute.sym_int()), (*strides(1), 1), 4)
    workspace = fake(Int32, (rows, ROW_WORDS), (ROW_WORDS, 1))
    indices = fake(Int32, (rows, cute.sym_int()), (*strides(1), 1), 4)
    values = fake(Float32, (rows, cute.sym_int()), (*strides(1), 1), 4)
    kernel = PagedIndexerSelectSm90(heads, dim, next_n, page_size, half, config)
    numbers = Int32(0), Int32(0), Int32(1)
    return compile_sm90(
        kernel, q, cache, weights, lengths, block_table, workspace, indices, values, *numbers, fake_stream()
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [
        (compile_paged_indexer_select, (heads, dim, next_n, page_size, half, choose_config(heads, next_n, half)))
        for heads in HEADS
        for dim in HEAD_DIMS
        for next_n in NEXT_N
        for page_size in PAGE_SIZES
        for half in {False, bound_by_arithmetic(heads, next_n)}
    ]
