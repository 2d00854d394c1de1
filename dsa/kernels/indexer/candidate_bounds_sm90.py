"""Bounds of the next pass of scores, from those that a query has so far: its sample, or its list of candidates.

Plan
- A CTA a query. What there is comes into shared memory; the `rank`-th largest (radix_select.py), or a number a little
  below it that is not below the bound that there was, is the new bound, and what is not below it the list, from the
  front.
- A row that fits the list needs no bound: -inf. A list that overflowed gets one that nothing reaches, and stays too
  long.
- The order of a list is any.
Shared memory: scores and keys, 8 KiB of digit counts.
Roofline: none; 16 KB a query of a sample, and 10 thousand instructions of a warp.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream
from dsa.cute.sm90 import WARP
from dsa.kernels.indexer.candidate_entries import fake_lists, load_entry, store_entry
from dsa.kernels.indexer.candidate_lists import CAPACITY, GROUP, LOG_GROUP, LOG_TILE, SAMPLES, TILE
from dsa.kernels.indexer.candidate_tiles import frame_of, key_range, tiles_of_pass
from dsa.kernels.indexer.radix_select import SelectMemory, find_floor

THREADS = 256
MINUS_INFINITY, NAN = float("-inf"), float("nan")


class CandidateBoundsSm90:
    def __init__(self, sample: bool):
        self.sample = sample
        self.room = SAMPLES if sample else CAPACITY

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
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=4,
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
        scores = smem.allocate_tensor(Float32, cute.make_layout(self.room), 16)
        own_keys = smem.allocate_tensor(Int32, cute.make_layout(1 if self.sample else CAPACITY), 16)
        kept = smem.allocate_tensor(Int32, cute.make_layout(1), 16)
        memory = SelectMemory.allocate(smem)
        memory.clear(tid, THREADS)
        if tid == 0:
            kept[0] = Int32(0)
        wait_for_prerequisite_grids()

        bound, count, overflow = Float32(MINUS_INFINITY), Int32(0), Int32(0)
        searched = False
        if const_expr(self.sample):
            frame = frame_of(query // block_q, block_q, starts, ends, keys, tid % WARP)
            _, length = key_range(starts, ends, query, keys)
            count = cutlass.min(tiles_of_pass(frame, log_stride) << LOG_TILE, SAMPLES)
            sample = cute.make_tensor(
                cute.recast_ptr(entries[query, None].iterator, dtype=Float32), cute.make_layout(2 * CAPACITY)
            )
            for i in cutlass.range(tid, count // 4, THREADS, unroll=2):
                cute.autovec_copy(cute.local_tile(sample, (4,), (i,)), cute.local_tile(scores, (4,), (i,)))
            searched = length > CAPACITY and count > rank
        else:
            front, back = counts[query, 0], counts[query, 1]
            count, bound = front + back, bounds[query]
            overflow = Int32(count > CAPACITY)
            if overflow > 0:
                count = Int32(0)
            for i in cutlass.range(tid, count, THREADS, unroll=4):
                at = i if i < front else CAPACITY - 1 - (i - front)
                score, key = load_entry(entries, query, at)
                scores[i] = score
                own_keys[i] = key
            if tid < (0 - count) & 3:
                scores[count + tid] = Float32(NAN)
            searched = bound > MINUS_INFINITY and count > rank
        cute.arch.sync_threads()

        if searched:
            slack = rank >> 4
            floor = find_floor(scores, (count + 3) // 4, rank, slack, memory, tid, THREADS)[0]
            # A little below the lowest of a list may be below its bound: the list does not have what is in between.
            bound = cute.arch.fmax(bound, floor)
        for i in cutlass.range(tid, count, THREADS, unroll=2):
            score = scores[i]
            if score >= bound:
                at = cute.arch.atomic_add(kept.iterator, Int32(1), scope="cta")
                key = Int32(0)
                if const_expr(self.sample):
                    tile, place = (i >> LOG_TILE) << log_stride, i & (TILE - 1)
                    group = frame.base + (place >> LOG_GROUP) * frame.tiles + tile
                    key = (group << LOG_GROUP) + (place & (GROUP - 1))
                else:
                    key = own_keys[i]
                if at < CAPACITY:
                    store_entry(entries, query, at, score, key)
        cute.arch.sync_threads()
        if tid == 0:
            # Nothing is appended any more to a list that is too long already.
            bounds[query] = Float32(NAN) if overflow > 0 else bound
            counts[query, 0] = Int32(CAPACITY + 1) if overflow > 0 else kept[0]
            counts[query, 1] = Int32(0)


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
