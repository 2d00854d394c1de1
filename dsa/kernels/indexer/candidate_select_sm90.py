"""The k largest of a query's candidates, of equal scores the lowest keys, in ascending order of the keys; and which
queries have none that can be told from their list.

Plan
- A CTA a query, the list in shared memory. radix_select.py finds the k-th largest score. Where more scores equal it
  than are needed, the highest key of those that are is searched bit by bit.
- Order: the selected are counted in 4096 buckets of keys, all as wide; a scan says where each bucket begins, and within
  a bucket every key counts those below it.
- A list that is too long, or has fewer than min(k, keys) of those above a bound, says nothing: the query's end goes to
  `remaining`, for indexer_select_sm90. All others have NOTHING_LEFT there.
Shared memory: 73 KiB, three CTAs a multiprocessor.
Roofline: none; 25 KB a query and about 10 thousand instructions of a warp.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from dsa.cute.compile_cache import cached, compile_sm90
from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.cute.limits import MAX_SLOTS
from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.sm90 import WARP
from dsa.kernels.indexer.candidate_entries import fake_lists, load_entry
from dsa.kernels.indexer.candidate_lists import CAPACITY, LOG_MAX_KEYS, NOTHING_LEFT
from dsa.kernels.indexer.candidate_tiles import key_range
from dsa.kernels.indexer.limits import PAGED, ROW_TO_SEQ, VALUES
from dsa.kernels.indexer.radix_select import SelectMemory, find_floor, next_above
from dsa.kernels.indexer.select_limits import MAX_SELECTED
from dsa.kernels.indexer.selection_list import number_of, order_of

THREADS = 256
LOG_BUCKETS = 12
BUCKETS = 1 << LOG_BUCKETS
OWN_BUCKETS = BUCKETS // THREADS
MINUS_INFINITY, NAN = float("-inf"), float("nan")


class CandidateSelectSm90:
    @cute.jit
    def __call__(
        self,
        starts: cute.Tensor,
        ends: cute.Tensor,
        entries: cute.Tensor,
        counts: cute.Tensor,
        bounds: cute.Tensor,
        remaining: cute.Tensor,
        block_table: cute.Tensor,
        row_to_seq: cute.Tensor,
        indices: cute.Tensor,
        values: cute.Tensor,
        keys: Int32,
        page_size: Int32,
        options: Int32,
        stream,
    ):
        divisor = cute.fast_divmod_create_divisor_v2(page_size)
        self.kernel(
            *(starts, ends, entries, counts, bounds, remaining, block_table, row_to_seq, indices, values),
            *(keys, divisor, page_size, options),
        ).launch(
            grid=(starts.shape[0], 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=3,
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
        remaining: cute.Tensor,
        block_table: cute.Tensor,
        row_to_seq: cute.Tensor,
        indices: cute.Tensor,
        values: cute.Tensor,
        keys: Int32,
        divisor: cute.FastDivmodDivisorV2,
        page_size: Int32,
        options: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        query, _, _ = cute.arch.block_idx()
        smem = SmemAllocator()
        scores = smem.allocate_tensor(Float32, cute.make_layout(CAPACITY), 16)
        own_keys = smem.allocate_tensor(Int32, cute.make_layout(CAPACITY), 16)
        order = smem.allocate_tensor(Int32, cute.make_layout(MAX_SELECTED), 16)
        buckets = smem.allocate_tensor(Int32, cute.make_layout(BUCKETS), 16)
        memory = SelectMemory.allocate(smem)
        memory.clear(tid, THREADS)
        zero = cute.make_rmem_tensor((4,), Int32)
        zero.fill(0)
        for i in cutlass.range(tid, BUCKETS // 4, THREADS, unroll=2):
            cute.autovec_copy(zero, cute.local_tile(buckets, (4,), (i,)))
        wait_for_prerequisite_grids()

        k = indices.shape[1]
        first_key, length = key_range(starts, ends, query, keys)
        front, back = counts[query, 0], counts[query, 1]
        count = front + back
        unknown = count > CAPACITY or (count < cutlass.min(k, length) and bounds[query] > MINUS_INFINITY)
        if tid == 0:
            remaining[query] = first_key + length if unknown else Int32(NOTHING_LEFT)
        if not unknown:
            for i in cutlass.range(tid, count, THREADS, unroll=4):
                score, key = load_entry(entries, query, i if i < front else CAPACITY - 1 - (i - front))
                scores[i] = score
                own_keys[i] = key - first_key
            if tid < (0 - count) & 3:
                scores[count + tid] = Float32(NAN)
            cute.arch.sync_threads()

            # Selected are scores from `above` on, and those from `floor` on with keys up to `last`.
            floor, above, last = Float32(MINUS_INFINITY), Float32(MINUS_INFINITY), Int32(0)
            if count > k:
                floor, equal, excess = find_floor(scores, (count + 3) // 4, k, Int32(0), memory, tid, THREADS)
                above = floor
                if excess > 0:
                    above = next_above(floor)
                    last = self.last_of_equal(scores, own_keys, count, floor, equal, memory, tid)
            shift = cutlass.max(32 - LOG_BUCKETS - Int32(cute.arch.clz(Uint32(length - 1))), 0)
            for i in cutlass.range(tid, count, THREADS, unroll=2):
                score, key = scores[i], own_keys[i]
                if score >= above or (score >= floor and key <= last):
                    cute.arch.atomic_add(buckets.iterator + (key >> shift), Int32(1), scope="cta")
            cute.arch.sync_threads()
            found = self.begin_buckets(buckets, memory, tid)
            cute.arch.sync_threads()
            for i in cutlass.range(tid, count, THREADS, unroll=2):
                score, key = scores[i], own_keys[i]
                if score >= above or (score >= floor and key <= last):
                    at = cute.arch.atomic_add(buckets.iterator + (key >> shift), Int32(1), scope="cta")
                    order[at] = i
            cute.arch.sync_threads()

            sequence, last_page, known = query, block_table.shape[1] - 1, Int32(1)
            if options & PAGED:
                if options & ROW_TO_SEQ:
                    sequence = row_to_seq[query]
                known = Int32(sequence >= 0 and sequence < block_table.shape[0] and last_page >= 0)
            for p in cutlass.range(tid, found, THREADS, unroll=1):
                i = order[p]
                index, value = own_keys[i], number_of(order_of(scores[i]))
                bucket = index >> shift
                # Each bucket's number is where it ends by now, and where the next one begins.
                rank = Int32(0)
                if bucket > 0:
                    rank = buckets[bucket - 1]
                for other in cutlass.range(rank, buckets[bucket], unroll=1):
                    if own_keys[order[other]] < index:
                        rank += 1
                if options & PAGED:
                    slot = Int32(-1)
                    if known > 0:
                        page, offset = divmod(index, divisor)
                        physical = block_table[sequence, cutlass.min(page, last_page)]
                        wide = Int64(physical) * page_size + offset
                        if page <= last_page and physical >= 0 and wide < Int64(MAX_SLOTS):
                            slot = Int32(wide)
                    index = slot
                    value = value if slot >= 0 else -Float32(float("inf"))
                indices[query, rank] = index
                if options & VALUES:
                    values[query, rank] = value
            for i in cutlass.range(found + tid, k, THREADS, unroll=1):
                indices[query, i] = Int32(-1)
                if options & VALUES:
                    values[query, i] = -Float32(float("inf"))

    @cute.jit
    def last_of_equal(
        self, scores: cute.Tensor, own_keys: cute.Tensor, count, floor, equal, memory: SelectMemory, tid
    ) -> Int32:
        """The `equal`-th lowest key of the scores that equal `floor`: the largest number below which there are fewer
        keys."""
        last = Int32(0)
        for step in cutlass.range(LOG_MAX_KEYS, unroll=1):
            trial = last | (Int32(1) << (LOG_MAX_KEYS - 1 - step))
            here = Int32(0)
            for i in cutlass.range(tid, count, THREADS, unroll=2):
                if scores[i] == floor and own_keys[i] < trial:
                    here += 1
            _, below = block_exclusive_scan(here, memory.sums[step & 1, None], tid % WARP, tid // WARP)
            if below < equal:
                last = trial
        cute.arch.sync_threads()
        return last

    @cute.jit
    def begin_buckets(self, buckets: cute.Tensor, memory: SelectMemory, tid) -> Int32:
        """Turn the buckets' counts into where each begins. -> the sum of all."""
        mine = cute.make_rmem_tensor((OWN_BUCKETS,), Int32)
        total = Int32(0)
        for i in cutlass.range_constexpr(OWN_BUCKETS):
            mine[i] = buckets[tid * OWN_BUCKETS + i]
            total += mine[i]
        begin, found = block_exclusive_scan(total, memory.sums[0, None], tid % WARP, tid // WARP)
        for i in cutlass.range_constexpr(OWN_BUCKETS):
            buckets[tid * OWN_BUCKETS + i] = begin
            begin += mine[i]
        return found


@cached
def compile_candidate_select():
    """-> f(starts [S], ends [S], entries [S, CAPACITY] int64, counts [S, 2] int32, bounds [S], remaining [S] int32,
    block_table [B, pages], row_to_seq [S], indices [S, k] int32, values [S, k] fp32, keys, page_size, options); S > 0,
    0 < keys < MAX_KEYS, 0 < k <= MAX_SELECTED. `options` says which of the tensors are given."""
    queries, k = cute.sym_int(), cute.sym_int()
    starts, ends = fake(Int32, (queries,), (1,), 4), fake(Int32, (queries,), (1,), 4)
    remaining = fake(Int32, (queries,), (1,), 4)
    block_table = fake(Int32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4)
    row_to_seq = fake(Int32, (cute.sym_int(),), strides(1), 4)
    indices = fake(Int32, (queries, k), (*strides(1), 1), 4)
    values = fake(Float32, (cute.sym_int(), cute.sym_int()), (*strides(1), 1), 4)
    return compile_sm90(
        CandidateSelectSm90(),
        *(starts, ends, *fake_lists(queries), remaining, block_table, row_to_seq, indices, values),
        *(Int32(1), Int32(1), Int32(0), fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_candidate_select, ())]
