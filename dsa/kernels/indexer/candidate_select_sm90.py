"""For each query, select the k candidates with the largest scores, in ascending order of keys. Ties (equal scores) go
to the lowest keys.

The kernel writes the results of queries whose list determines them, and marks the other queries in `remaining`.

Plan
- One CTA per query, with the list of candidates in the registers of the CTA's threads. radix_select.py searches for the
  k-th largest score in ranges of scores ("digits"). The search divides the digit that contains this score until all
  candidates of the digit are selected, the digit has few candidates, or the digit is a single score. If the digit has
  few candidates, warps compare each of them with the others to find which are selected; ties go to the lowest keys. If
  the digit is a single score with many candidates, all of them are ties, and a search bit by bit finds the highest key
  that is selected.
- Order: the CTA counts the selected candidates in up to 4096 buckets of keys, all equally wide. The buckets reuse the
  memory of the digit counts, with two 16-bit counts per word. A scan finds where each bucket begins. A key's output
  position within the bucket follows from comparisons with the bucket's other keys.
- A list does not determine the result if it overflowed, or if it has a bound above -inf and fewer entries than min(k,
  number of keys that the query sees). The kernel then writes the end of the query's key range to `remaining`, so that
  indexer_select_sm90 computes the query. For all other queries it writes NOTHING_LEFT.
Shared memory: 25 KiB.
Registers: 16 candidates per thread, two registers each; four CTAs per SM.
Roofline: bound by the issue slots. A query's CTA loads 22 KB and executes about 10 thousand warp instructions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream
from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.sm90 import WARP
from dsa.kernels.indexer.candidate_lists import BATCH, CAPACITY, LOG_MAX_KEYS, NOTHING_LEFT
from dsa.kernels.indexer.candidate_passes import fake_lists, load_candidates
from dsa.kernels.indexer.limits import MAX_SELECTED, PAGED, VALUES
from dsa.kernels.indexer.radix_select import (
    BINS,
    HIGHEST,
    LOWEST,
    RankFound,
    RankMemory,
    SelectMemory,
    number_of,
    order_of,
)
from dsa.kernels.indexer.score_mainloop import key_range
from dsa.kernels.indexer.selected_slots import Paging, fake_selection, fill_rest
from dsa.runtime.compile_cache import cached, compile_sm90

THREADS, CTAS = 256, 4  # threads per CTA, CTAs per SM
OWN = -(-CAPACITY // THREADS)  # candidates per thread
LOG_BUCKETS = 12
OWN_WORDS = (1 << LOG_BUCKETS) // 2 // THREADS  # words per thread, two buckets per word
assert (1 << LOG_BUCKETS) // 2 <= BINS  # the buckets reuse the memory of the digit counts
FEW = WARP  # a digit with at most this many candidates is ranked by comparison, one candidate per lane
NO_KEY = -1


@dataclass(frozen=True)
class Memory:
    """Shared memory, int32. Keys are relative to the query's first key.

    rank          memory of the search; its digit counts are later reused as buckets
    few           [2, FEW]: if the digit that the search found has at most FEW candidates, their orders and keys
    few_count     [1]: number of candidates in `few`
    last          [2]: order and key of the worst candidate in `few` that is selected
    keys, orders  [MAX_SELECTED]: the selected candidates, sorted by bucket. `keys` has two more elements: a NO_KEY
                  before the first key and one after the last. `orders` is written only with VALUES
    """

    rank: RankMemory
    few: cute.Tensor
    few_count: cute.Tensor
    last: cute.Tensor
    keys: cute.Tensor
    orders: cute.Tensor

    @staticmethod
    def allocate(smem) -> "Memory":
        return Memory(
            RankMemory.allocate(smem),
            smem.allocate_tensor(Int32, cute.make_layout((2, FEW), stride=(FEW, 1)), 16),
            smem.allocate_tensor(Int32, cute.make_layout(1), 16),
            smem.allocate_tensor(Int32, cute.make_layout(2), 16),
            smem.allocate_tensor(Int32, cute.make_layout(MAX_SELECTED + 2), 16),
            smem.allocate_tensor(Int32, cute.make_layout(MAX_SELECTED), 16),
        )


@cute.jit
def is_selected(order: Int32, key: Int32, floor: Int32, last: Int32):
    """Whether a candidate is selected, given the result of `CandidateSelectSm90.cut`."""
    return order > floor or (order == floor and key <= last)


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
            min_blocks_per_mp=CTAS,
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
        memory = Memory.allocate(SmemAllocator())
        memory.rank.digits.clear(tid, THREADS)
        if tid == 0:
            memory.few_count[0] = Int32(0)
        wait_for_prerequisite_grids()

        k = indices.shape[1]
        first_key, length = key_range(starts, ends, query, keys)
        front, back = counts[query, 0], counts[query, 1]
        count = front + back
        unknown = count > CAPACITY or (count < cutlass.min(k, length) and bounds[query] > -float("inf"))
        if tid == 0:
            remaining[query] = first_key + length if unknown else Int32(NOTHING_LEFT)
        if not unknown:
            orders, own_keys = cute.make_rmem_tensor((OWN,), Int32), cute.make_rmem_tensor((OWN,), Int32)
            load_candidates(entries, query, front, count, first_key, orders, own_keys, tid, THREADS)
            floor, last = Int32(LOWEST), Int32(-1)
            if count > k:
                least = order_of(bounds[query])
                found = memory.rank.find(orders, count, least, k, Int32(0), FEW, tid, THREADS)
                floor, last = self.cut(found, orders, own_keys, count, memory, tid)
            else:
                cute.arch.sync_threads()

            shift = cutlass.max(32 - LOG_BUCKETS - Int32(cute.arch.clz(Uint32(length - 1))), 0)
            for base in cutlass.range_constexpr(0, OWN, BATCH):
                if base * THREADS < count:
                    for i in cutlass.range_constexpr(base, base + BATCH):
                        if is_selected(orders[i], own_keys[i], floor, last):
                            self.add_to_bucket(memory.rank.digits.counts, own_keys[i] >> shift)
            cute.arch.sync_threads()
            selected = self.begin_buckets(memory.rank.digits, tid)
            cute.arch.sync_threads()
            for base in cutlass.range_constexpr(0, OWN, BATCH):
                if base * THREADS < count:
                    for i in cutlass.range_constexpr(base, base + BATCH):
                        if is_selected(orders[i], own_keys[i], floor, last):
                            at = self.add_to_bucket(memory.rank.digits.counts, own_keys[i] >> shift)
                            memory.keys[1 + at] = own_keys[i]
                            if options & VALUES:
                                memory.orders[at] = orders[i]
            if tid == 0:
                memory.keys[0], memory.keys[1 + selected] = Int32(NO_KEY), Int32(NO_KEY)
            cute.arch.sync_threads()

            paging = Paging(block_table, row_to_seq, divisor, page_size)
            sequence, known = query, Int32(1)
            if options & PAGED:
                sequence = paging.sequence(query, options)
                known = Int32(paging.exists(sequence))
            for p in cutlass.range(tid, selected, THREADS, unroll=1):
                index = memory.keys[1 + p]
                # The other keys of the bucket are adjacent. Each larger key before this key lowers this key's output
                # position `rank` by one. Each smaller key after this key raises `rank` by one.
                rank, at, other = p, p, memory.keys[p]
                while other >> shift == index >> shift:
                    if other > index:
                        rank -= 1
                    at -= 1
                    other = memory.keys[at]
                at, other = p + 2, memory.keys[p + 2]
                while other >> shift == index >> shift:
                    if other < index:
                        rank += 1
                    at += 1
                    other = memory.keys[at]
                value = -Float32(float("inf"))
                if options & VALUES:
                    value = number_of(memory.orders[p])
                if options & PAGED:
                    slot = Int32(-1)
                    if known > 0:
                        slot = paging.slot(sequence, index)
                    index = slot
                    value = value if slot >= 0 else -Float32(float("inf"))
                indices[query, rank] = index
                if options & VALUES:
                    values[query, rank] = value
            fill_rest(indices, values, query, selected, options, tid, THREADS)

    @cute.jit
    def cut(self, found: RankFound, orders: cute.Tensor, own_keys: cute.Tensor, count: Int32, memory: Memory, tid):
        """Find which candidates of the digit `found` are among the query's k best: the digit's `found.rank` best, where
        ties go to the lowest keys. -> (floor, last), for `is_selected`."""
        floor, last = found.low, Int32(HIGHEST)
        if found.inside > found.rank:
            if found.inside <= FEW:
                for base in cutlass.range_constexpr(0, OWN, BATCH):
                    if base * THREADS < count:
                        for i in cutlass.range_constexpr(base, base + BATCH):
                            if (Uint32(orders[i]) - Uint32(found.low)) >> Uint32(found.shift) == 0:
                                at = cute.arch.atomic_add(memory.few_count.iterator, Int32(1), scope="cta")
                                memory.few[0, at], memory.few[1, at] = orders[i], own_keys[i]
                cute.arch.sync_threads()
                # Each of the 8 warps ranks every 8th candidate in `few`: it counts the candidates in `few` that are
                # better. Of two that tie, the one with the lower key is better.
                lane = tid % WARP
                order, key = memory.few[0, lane], memory.few[1, lane]
                for i in cutlass.range(tid // WARP, found.inside, THREADS // WARP, unroll=1):
                    own, own_key = memory.few[0, i], memory.few[1, i]
                    better = lane < found.inside and (order > own or (order == own and key < own_key))
                    if cute.arch.popc(cute.arch.vote_ballot_sync(better)) == found.rank - 1:
                        memory.last[0], memory.last[1] = own, own_key
                cute.arch.sync_threads()
                floor, last = memory.last[0], memory.last[1]
            else:
                last = self.last_of_equal(orders, own_keys, found, memory, tid)
        return floor, last

    @cute.jit
    def last_of_equal(self, orders: cute.Tensor, own_keys: cute.Tensor, found: RankFound, memory: Memory, tid) -> Int32:
        """Return the `found.rank`-th lowest key of the candidates that tie at order `found.low`. It is found bit by
        bit, as the largest number that has fewer than `found.rank` of these keys below it."""
        last = Int32(0)
        for step in cutlass.range(LOG_MAX_KEYS, unroll=1):
            trial = last | (Int32(1) << (LOG_MAX_KEYS - 1 - step))
            here = Int32(0)
            for i in cutlass.range_constexpr(OWN):
                if orders[i] == found.low and own_keys[i] < trial:
                    here += 1
            _, below = block_exclusive_scan(here, memory.rank.digits.sums[step & 1, None], tid % WARP, tid // WARP)
            if below < found.rank:
                last = trial
        cute.arch.sync_threads()
        return last

    @cute.jit
    def add_to_bucket(self, buckets: cute.Tensor, bucket: Int32) -> Int32:
        """Increment a bucket's number. -> the number before the increment: the bucket's count so far or, after
        `begin_buckets`, the bucket's next free position."""
        half = (bucket & 1) << 4
        word = cute.arch.atomic_add(buckets.iterator + (bucket >> 1), Int32(1) << half, scope="cta")
        return (word >> half) & 0xFFFF

    @cute.jit
    def begin_buckets(self, memory: SelectMemory, tid) -> Int32:
        """Replace each bucket's count by the position of the bucket's first key among the selected keys. -> the sum of
        all counts."""
        words = cute.make_rmem_tensor((OWN_WORDS,), Int32)
        own = cute.local_tile(memory.counts, (OWN_WORDS,), (tid,))
        cute.autovec_copy(own, words)
        total = Int32(0)
        for i in cutlass.range_constexpr(OWN_WORDS):
            total += (words[i] & 0xFFFF) + (words[i] >> 16)
        begin, found = block_exclusive_scan(total, memory.sums[0, None], tid % WARP, tid // WARP)
        for i in cutlass.range_constexpr(OWN_WORDS):
            low, high = words[i] & 0xFFFF, words[i] >> 16
            words[i] = begin | ((begin + low) << 16)
            begin += low + high
        cute.autovec_copy(words, own)
        return found


@cached
def compile_candidate_select():
    """-> f(starts [S], ends [S], entries [S, CAPACITY] int64, counts [S, 2], bounds [S] fp32, remaining [S],
    block_table [B, pages], row_to_seq [S], indices [S, k], values [S, k] fp32, keys, page_size, options); S > 0, 0 <
    keys < MAX_KEYS, 0 < k <= MAX_SELECTED. Tensors without a dtype are int32. keys is the number of keys. The bits of
    `options` say which of block_table, row_to_seq and values are used; the others may have any size."""
    queries = cute.sym_int()
    starts, ends = fake(Int32, (queries,), (1,), 4), fake(Int32, (queries,), (1,), 4)
    remaining = fake(Int32, (queries,), (1,), 4)
    return compile_sm90(
        CandidateSelectSm90(),
        *(starts, ends, *fake_lists(queries), remaining, *fake_selection(queries)),
        *(Int32(1), Int32(1), Int32(0), fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return a (compile function, arguments) pair for each variant that the op can ask for."""
    return [(compile_candidate_select, ())]
