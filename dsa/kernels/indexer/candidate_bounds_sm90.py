"""Compute each query's bound for the next pass of scores, from the query's sample (after the first pass) or from its
list of candidates (after a later pass). candidate_lists.py describes the passes.

Plan
- One CTA per query. The CTA loads the scores of the query's sample or list into registers. The new bound is the
  `rank`-th largest score or a number slightly below it, but not below the old bound. The scores that are not below the
  new bound, ties with the bound included, become the list, stored from the front.
- radix_select.py searches for the rank-th largest number: it counts the numbers in ranges of equal width ("digits").
  For a sample, the search counts maxima instead of scores. A thread has four maxima, each over up to six scores of
  different tiles. Let x be the largest number such that every thread has a maximum of at least x. If the rank is at
  most the number of threads, the rank-th largest maximum is at least x. The digits begin at x, and one pass over the
  maxima, a sixth of the numbers, is usually enough. If a query sees so little of the sample that there are fewer maxima
  than `rank`, or if the rank exceeds the number of threads, the CTA counts all scores.
- After the first pass, the bound is -inf if all keys that the query sees fit in a list, or if the sample has at most
  `rank` scores. After a later pass, a bound of -inf stays, and so does the bound of a list with at most `rank` entries.
  A list that overflowed gets a bound of NaN, which no score reaches, and a length of CAPACITY + 1.
- The order of a list's entries is unspecified.
Shared memory: 8 KiB of digit counts and a few sums; for a sample also 32 KiB, where the kept scores are collected.
Registers: for a sample, a thread has 24 scores and at most 48 registers, so that an SM has room for five CTAs. For a
list, a thread has 16 entries and at most 64 registers, so that an SM has room for four CTAs.
Roofline: bound by the issue slots. With a sample, a query's CTA loads up to 24 KB and executes 7 thousand warp
instructions.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream
from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.sm90 import WARP
from dsa.kernels.indexer.candidate_lists import BATCH, CAPACITY, GROUP, LOG_GROUP, LOG_TILE, SAMPLES, TILE
from dsa.kernels.indexer.candidate_passes import (
    fake_lists,
    frame_of,
    from_warp,
    load_candidates,
    store_entry,
    tiles_of_pass,
)
from dsa.kernels.indexer.radix_select import RankMemory, number_of, order_of
from dsa.kernels.indexer.score_mainloop import key_range
from dsa.runtime.compile_cache import cached, compile_sm90

THREADS, SAMPLE_CTAS, LIST_CTAS = 256, 5, 4  # threads per CTA; CTAs per SM for a sample, for a list
VECTOR = 4  # scores of a sample per load
MINUS_INFINITY, NAN = float("-inf"), float("nan")


class CandidateBoundsSm90:
    def __init__(self, sample: bool):
        self.sample = sample
        self.threads, self.ctas = THREADS, SAMPLE_CTAS if sample else LIST_CTAS
        self.own = -(-(SAMPLES if sample else CAPACITY) // self.threads)  # scores per thread
        assert BATCH % VECTOR == 0  # every batch of a sample begins with a new vector

    @cute.jit
    def __call__(
        self,
        starts: cute.Tensor,
        ends: cute.Tensor,
        entries: cute.Tensor,
        counts: cute.Tensor,
        bounds: cute.Tensor,
        keys: Int32,
        block_q: Int32,
        log_stride: Int32,
        rank: Int32,
        stream,
    ):
        self.kernel(starts, ends, entries, counts, bounds, keys, block_q, log_stride, rank).launch(
            grid=(starts.shape[0], 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        starts: cute.Tensor,
        ends: cute.Tensor,
        entries: cute.Tensor,
        counts: cute.Tensor,
        bounds: cute.Tensor,
        keys: Int32,
        block_q: Int32,
        log_stride: Int32,
        rank: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        query, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        memory = RankMemory.allocate(smem)
        if const_expr(self.sample):
            staged = smem.allocate_tensor(Int32, cute.make_layout((CAPACITY, 2)), 16)
        memory.digits.clear(tid, self.threads)
        wait_for_prerequisite_grids()

        orders = cute.make_rmem_tensor((self.own,), Int32)
        own_keys = cute.make_rmem_tensor((1 if self.sample else self.own,), Int32)
        bound, count, overflow, searched = Float32(MINUS_INFINITY), Int32(0), Int32(0), False
        if const_expr(self.sample):
            base_group, tiles = frame_of(query // block_q, block_q, starts, ends, keys, tid % WARP)
            _, length = key_range(starts, ends, query, keys)
            count = cutlass.min(tiles_of_pass(tiles, log_stride) << LOG_TILE, SAMPLES)
            self.load_sample(entries, query, count, orders, tid)
            searched = length > CAPACITY and count > rank
        else:
            front, back = counts[query, 0], counts[query, 1]
            count, bound = front + back, bounds[query]
            overflow = Int32(count > CAPACITY)
            if overflow > 0:
                count = Int32(0)
            load_candidates(entries, query, front, count, Int32(0), orders, own_keys, tid, self.threads)
            searched = bound > MINUS_INFINITY and count > rank
            count = from_warp(count, tid)  # from here on, relative to this warp's first thread (`from_warp`)
        cute.arch.sync_threads()  # all threads have read the list before any thread overwrites it

        low = order_of(bound)
        if searched:
            # The search starts at the old bound (-inf for a sample), because the list has no score below that bound.
            found = low
            if const_expr(self.sample):
                if rank <= self.threads:
                    found = self.bound_of_maxima(orders, low, rank, memory, tid)
            # A list has no maxima, and the maxima of a sample do not always suffice. Then search all scores.
            if found == low:
                found = memory.find(orders, count, low, rank, rank >> 4, 0, tid, self.threads).low
            low = found
        kept = Int32(0)
        for base in cutlass.range_constexpr(0, self.own, BATCH):
            if base * self.threads < count:
                for i in cutlass.range_constexpr(base, base + BATCH):
                    kept += Int32(1) if orders[i] >= low else Int32(0)
        place, total = block_exclusive_scan(kept, memory.digits.sums[1, None], tid % WARP, tid // WARP)
        if const_expr(self.sample):
            self.store_sample(
                *(entries, query, base_group, tiles, log_stride, orders, count, low, place, total, staged, tid)
            )
        else:
            for base in cutlass.range_constexpr(0, self.own, BATCH):
                if base * self.threads < count:
                    for i in cutlass.range_constexpr(base, base + BATCH):
                        if orders[i] >= low:
                            store_entry(entries, query, place, number_of(orders[i]), own_keys[i])
                            place += 1
        if tid == 0:
            bounds[query] = Float32(NAN) if overflow > 0 else number_of(low)
            counts[query, 0] = Int32(CAPACITY + 1) if overflow > 0 else total
            counts[query, 1] = Int32(0)

    @cute.jit
    def load_sample(self, entries: cute.Tensor, query, count: Int32, orders: cute.Tensor, tid):
        """Load the `count` scores that the first pass has stored for the query, and convert them to orders
        (`order_of`). A score is NaN if the query does not see the key."""
        sample = cute.make_tensor(
            cute.recast_ptr(entries[query, None].iterator, dtype=Float32), cute.make_layout(2 * CAPACITY)
        )
        vectors = self.own // VECTOR
        scores = cute.make_rmem_tensor((VECTOR, vectors), Float32)
        scores.fill(NAN)
        for v in cutlass.range_constexpr(vectors):
            first = self.first_of_vector(tid, v)
            if first < count:
                cute.autovec_copy(cute.local_tile(sample, (VECTOR,), (first // VECTOR,)), scores[None, v])
        for i in cutlass.range_constexpr(self.own):
            orders[i] = order_of(scores[i])

    @cute.jit
    def bound_of_maxima(self, orders: cute.Tensor, low: Int32, rank: Int32, memory: RankMemory, tid) -> Int32:
        """-> an order that is at most the rank-th largest of the sample, and close to it; `low` if there are fewer
        maxima than `rank`.

        Maximum j of a thread is the largest of the j-th scores of all the thread's vectors. These scores belong to
        different tiles, so few of the largest scores are not maxima."""
        maxima = cute.make_rmem_tensor((VECTOR,), Int32)
        for j in cutlass.range_constexpr(VECTOR):
            maxima[j] = orders[j]
            for i in cutlass.range_constexpr(VECTOR + j, self.own, VECTOR):
                maxima[j] = cutlass.max(maxima[j], orders[i])
        # `above` is the number x in the docstring of this file: every thread has a maximum of at least `above`.
        largest = cutlass.max(cutlass.max(maxima[0], maxima[1]), cutlass.max(maxima[2], maxima[3]))
        least = cute.arch.warp_redux_sync(largest, "min")
        if tid % WARP == 0:
            memory.digits.sums[1, tid // WARP] = least
        cute.arch.sync_threads()
        least = memory.digits.sums[1, cutlass.min(tid % WARP, self.threads // WARP - 1)]
        above = cutlass.max(low, cute.arch.warp_redux_sync(least, "min"))
        found = memory.find(maxima, Int32(VECTOR * self.threads), above, rank, rank >> 4, 0, tid, self.threads)
        return found.low

    @cute.jit
    def store_sample(
        self,
        entries,
        query,
        base_group,
        tiles,
        log_stride: Int32,
        orders,
        count,
        low,
        place,
        total,
        kept: cute.Tensor,
        tid,
    ):
        """Store in the list the scores whose orders are not below `low`: `total` scores, or the first CAPACITY of them.
        This thread's scores go to entry `place` and the following entries. The threads have different numbers of these
        scores. So they first write orders and indices in the sample to `kept` (shared memory). Then each thread
        computes the keys of equally many scores."""
        for base in cutlass.range_constexpr(0, self.own, BATCH):
            if base * self.threads < count:
                for i in cutlass.range_constexpr(base, base + BATCH):
                    if orders[i] >= low:
                        if place < CAPACITY:
                            kept[place, 0] = orders[i]
                            kept[place, 1] = self.first_of_vector(tid, i // VECTOR) + i % VECTOR
                        place += 1
        cute.arch.sync_threads()
        for i in cutlass.range(tid, cutlass.min(total, CAPACITY), self.threads, unroll=1):
            order, number = kept[i, 0], kept[i, 1]
            tile, row = (number >> LOG_TILE) << log_stride, number & (TILE - 1)
            group = base_group + (row >> LOG_GROUP) * tiles + tile
            store_entry(entries, query, i, number_of(order), (group << LOG_GROUP) + (row & (GROUP - 1)))

    @cute.jit
    def first_of_vector(self, tid, vector: cutlass.Constexpr) -> Int32:
        """Return the index, in the sample, of the first score in this thread's vector number `vector`."""
        return (tid + vector * self.threads) * VECTOR


@cached
def compile_candidate_bounds(sample: bool):
    """Return the kernel that computes each query's bound for the next pass. It writes the bound to bounds, the
    candidates that reach the bound to entries, and (number of these candidates, 0) to counts. If a list overflowed, the
    bound is NaN and counts is (CAPACITY + 1, 0).

    sample: True after the first pass: entries holds fp32 scores of each query, and bounds and counts are only written.
    False after later passes: entries, counts (entries at the front, at the back) and bounds are also inputs.

    -> f(starts [S] int32, ends [S] int32, entries [S, CAPACITY] int64, counts [S, 2] int32, bounds [S] fp32, keys,
    block_q, log_stride, rank); S > 0. keys is the number of keys. block_q (queries per block) and log_stride are those
    of the pass before this kernel. rank comes from `bound_ranks`."""
    queries = cute.sym_int()
    starts, ends = fake(Int32, (queries,), (1,), 4), fake(Int32, (queries,), (1,), 4)
    return compile_sm90(CandidateBoundsSm90(sample), starts, ends, *fake_lists(queries), *[Int32(1)] * 4, fake_stream())


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [(compile_candidate_bounds, (sample,)) for sample in (True, False)]
