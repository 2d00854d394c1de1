"""Bounds of the next pass of scores, from those that a query has so far: its sample, or its list of candidates.

Plan
- A CTA a query. What there is comes into registers; the `rank`-th largest (candidate_rank.py), or a number a little
  below it that is not below the bound that there was, is the new bound, and what is not below it the list, from the
  front.
- Of a sample the digits of maxima are counted, each of up to six scores of different tiles, and only those from the
  least on that every thread has one of: so one pass does, over a sixth of the numbers. Where a query sees little of the
  sample, or a higher rank is asked for, digits of all are counted.
- A row that fits the list needs no bound: -inf. A list that overflowed gets one that nothing reaches, and stays too
  long.
- The order of a list is any.
Shared memory: 8 KiB of digit counts, and a little; 32 KiB of what stays of a sample.
Registers: 24 scores of a sample a thread, of 48, five CTAs a multiprocessor; or 16 entries of a list, of 64, four CTAs.
Roofline: none; up to 24 KB a query of a sample, and 7 thousand instructions of a warp.
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
from dsa.kernels.indexer.candidate_entries import fake_lists, from_warp, load_candidates, store_entry
from dsa.kernels.indexer.candidate_lists import BATCH, CAPACITY, GROUP, LOG_GROUP, LOG_TILE, SAMPLES, TILE
from dsa.kernels.indexer.candidate_rank import RankMemory
from dsa.kernels.indexer.candidate_tiles import Frame, frame_of, key_range, tiles_of_pass
from dsa.kernels.indexer.selection_list import number_of, order_of
from dsa.runtime.compile_cache import cached, compile_sm90

SAMPLE_THREADS, SAMPLE_CTAS = 256, 5  # of a CTA, and of a multiprocessor
LIST_THREADS, LIST_CTAS = 256, 4
VECTOR = 4  # scores of a sample that are read at a time
MINUS_INFINITY, NAN = float("-inf"), float("nan")


class CandidateBoundsSm90:
    def __init__(self, sample: bool):
        self.sample = sample
        self.threads, self.ctas = (SAMPLE_THREADS, SAMPLE_CTAS) if sample else (LIST_THREADS, LIST_CTAS)
        self.own = -(-(SAMPLES if sample else CAPACITY) // self.threads)  # numbers of a thread
        assert BATCH % VECTOR == 0  # a batch of a sample begins with a vector

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
            frame = frame_of(query // block_q, block_q, starts, ends, keys, tid % WARP)
            _, length = key_range(starts, ends, query, keys)
            count = cutlass.min(tiles_of_pass(frame, log_stride) << LOG_TILE, SAMPLES)
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
            count = from_warp(count, tid)  # from here on, which of the warp's registers hold none
        cute.arch.sync_threads()  # all is read before anything is written

        low = order_of(bound)
        if searched:
            # Digits begin at the bound that there was: the list does not have what is below it.
            found = low
            if const_expr(self.sample):
                if rank <= self.threads:
                    found = self.bound_of_maxima(orders, low, rank, memory, tid)
            # Of a sample: a higher rank, or a query that sees so little of it that there are few maxima.
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
            self.store_sample(entries, query, frame, log_stride, orders, count, low, place, total, staged, tid)
        else:
            for base in cutlass.range_constexpr(0, self.own, BATCH):
                if base * self.threads < count:
                    for i in cutlass.range_constexpr(base, base + BATCH):
                        if orders[i] >= low:
                            store_entry(entries, query, place, number_of(orders[i]), own_keys[i])
                            place += 1
        if tid == 0:
            # Nothing is appended any more to a list that is too long already.
            bounds[query] = Float32(NAN) if overflow > 0 else number_of(low)
            counts[query, 0] = Int32(CAPACITY + 1) if overflow > 0 else total
            counts[query, 1] = Int32(0)

    @cute.jit
    def load_sample(self, entries: cute.Tensor, query, count: Int32, orders: cute.Tensor, tid):
        """The orders of what the first pass has kept, which is NaN where the query does not see the key."""
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
        """About the rank-th largest of the sample, and no more: that of the maxima of what a thread has in the same
        place of its vectors, which are of different tiles. They are a sixth as many, and hardly ever are two of the
        largest few in a hundred in one of them. `low` where there are fewer maxima."""
        maxima = cute.make_rmem_tensor((VECTOR,), Int32)
        for j in cutlass.range_constexpr(VECTOR):
            maxima[j] = orders[j]
            for i in cutlass.range_constexpr(VECTOR + j, self.own, VECTOR):
                maxima[j] = cutlass.max(maxima[j], orders[i])
        # A thread has one at least that is not below the least of the threads' largest.
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
        self, entries, query, frame: Frame, log_stride: Int32, orders, count, low, place, total, kept: cute.Tensor, tid
    ):
        """Store what is not below `low`, a thread's from `place` on, by way of `kept` in shared memory: that is little,
        and its keys are computed by as many threads."""
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
            group = frame.base + (row >> LOG_GROUP) * frame.tiles + tile
            store_entry(entries, query, i, number_of(order), (group << LOG_GROUP) + (row & (GROUP - 1)))

    @cute.jit
    def first_of_vector(self, tid, vector: cutlass.Constexpr) -> Int32:
        """Which of the sample's scores a thread's vector begins with."""
        return (tid + vector * self.threads) * VECTOR


@cached
def compile_candidate_bounds(sample: bool):
    """sample: of the scores that the first pass has kept.

    -> f(starts [S], ends [S], entries [S, CAPACITY] int64, counts [S, 2] int32, bounds [S], keys, block_q, log_stride,
    rank); S > 0. block_q and log_stride are those of the pass in front."""
    queries = cute.sym_int()
    starts, ends = fake(Int32, (queries,), (1,), 4), fake(Int32, (queries,), (1,), 4)
    numbers = (Int32(1),) * 4
    return compile_sm90(CandidateBoundsSm90(sample), starts, ends, *fake_lists(queries), *numbers, fake_stream())


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_candidate_bounds, (sample,)) for sample in (True, False)]
