"""The union of the keys that a group of neighbouring queries selects, where it is so much less than their sum that the
group is attended to as one.

lists[g, :lengths[g]]: key | members << MEMBER_SHIFT, bit m of the members: query g * size + m has selected the key

A group whose union is more than MOST_UNION of the sum, or in which a query names a key twice, goes to the queue of
queries, the others to that of groups.

Work
- A CTA has a group, and in shared memory a table of TABLE_BYTES with `size` bits for a key: the members of a range of
  keys. An index sets its query's bit by an atomic or. Then each index whose query is the lowest member of its key is
  an entry of the list, so that every key is named once: by the warps' sums, a warp's 32 indices at a time. Keys beyond
  the table's range take another round.
- Before that the keys that are multiples of SAMPLE are counted in the same way. Selections that share too little are
  known by them, at the price of reading their indices. Where the sample is wrong, it costs time alone: a selection of
  multiples of SAMPLE alone seems SAMPLE times as wide and is never grouped, and one without any is counted in full.
- A round reads all indices three times, whether or not it has any of the keys, and the sample's table ends with the
  keys of SAMPLE rounds. So the op looks for groups among 2^21 keys at most (`dsa.ops.mla._shared_keys`).
Order of a list: by ranges of keys, then by the warps that read the indices: it follows from the group's selections.
Warp roles: none, all warps do the same. Launch: programmatic.
Roofline: memory, 4 bytes an index; 4096 queries of 2048 keys 13 us. Where groups are computed as such 6000 clocks each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass.memory import SmemAllocator

from dsa.cute.dependent_launch import wait_for_prerequisite_grids
from dsa.cute.fake_tensors import fake, fake_stream, strides
from dsa.cute.reductions import block_exclusive_scan
from dsa.kernels.mla.query_group_limits import GROUP_SIZES, MEMBER_SHIFT, MOST_UNION
from dsa.kernels.mla.query_groups import Queue
from dsa.runtime.compile_cache import cached, compile_sm90

THREADS, WARPS = 512, 16
TABLE_WORDS = 16384
SAMPLE = 32
# Upper limit of a sampled union, in percent of its share of MOST_UNION; above it the queries are computed one by one.
SLACK = 110
UNROLL = 4


@dataclass(frozen=True)
class Memory:
    """table  [TABLE_WORDS], of `size` bits a key
    sums     [32], zero beyond the CTA's warps
    found    [3]: keys that count, different keys of the sample or of the ranges so far, keys that a query names twice
    """

    table: cute.Tensor
    sums: cute.Tensor
    found: cute.Tensor


class SelectionUnionSm90:
    """Groups of `size` queries, 4 or 8."""

    def __init__(self, size: int):
        self.size = size
        self.per_word = 32 // size
        self.range = TABLE_WORDS * self.per_word  # keys of a round

    @cute.jit
    def __call__(
        self,
        indices: cute.Tensor,
        counts: cute.Tensor,
        has_counts: Int32,
        keys: Int32,
        lists: cute.Tensor,
        lengths: cute.Tensor,
        queued: cute.Tensor,
        groups: cute.Tensor,
        queries: cute.Tensor,
        stream,
    ):
        self.kernel(
            *(indices, counts, has_counts, keys, lists, lengths),
            *(Queue(groups, queued, 0), Queue(queries, queued, 1)),
        ).launch(
            grid=(lengths.shape[0], 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        indices: cute.Tensor,
        counts: cute.Tensor,
        has_counts: Int32,
        keys: Int32,
        lists: cute.Tensor,
        lengths: cute.Tensor,
        groups: Queue,
        queries: Queue,
    ):
        tid, _, _ = cute.arch.thread_idx()
        group, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        allocator = SmemAllocator()
        memory = Memory(
            allocator.allocate_tensor(Int32, cute.make_layout(TABLE_WORDS), byte_alignment=16),
            allocator.allocate_tensor(Int32, cute.make_layout(32), byte_alignment=16),
            allocator.allocate_tensor(Int32, cute.make_layout(4), byte_alignment=16),
        )
        wait_for_prerequisite_grids()
        first_query = group * self.size
        members = cutlass.min(indices.shape[0] - first_query, self.size)
        ends = []
        for m in cutlass.range_constexpr(self.size):
            end = Int32(0)
            if m < members:
                end = indices.shape[2]
                if has_counts > 0:
                    end = cutlass.max(cutlass.min(counts[first_query + m], end), 0)
            ends.append(end)
        if tid < 32:
            memory.sums[tid] = 0
        if tid < 4:
            memory.found[tid] = 0
        self.clear(memory, (keys + SAMPLE - 1) // SAMPLE, tid)
        cute.arch.sync_threads()
        self.insert(indices, ends, first_query, keys, Int32(0), memory, warp, lane, sample=True)
        cute.arch.sync_threads()
        selected, sampled, repeated = memory.found[0], memory.found[1], memory.found[2]
        most = Int64(selected) * (MOST_UNION[0] * SLACK)
        shares = repeated == 0 and Int64(sampled) * (SAMPLE * MOST_UNION[1] * 100) <= most
        length = Int32(0)
        if shares:
            cute.arch.sync_threads()
            if tid == 0:
                memory.found[1] = 0
            for first in cutlass.range(0, keys, self.range, unroll=1):
                self.clear(memory, keys - first, tid)
                cute.arch.sync_threads()
                self.insert(indices, ends, first_query, keys, first, memory, warp, lane, sample=False)
                cute.arch.sync_threads()
                length += self.append(lists, indices, ends, first_query, keys, first, group, length, memory, warp, lane)
                cute.arch.sync_threads()
            shares = memory.found[2] == 0 and Int64(length) * MOST_UNION[1] <= Int64(selected) * MOST_UNION[0]
        if tid == 0:
            lengths[group] = length
            if shares:
                groups.add(group, 1)
            else:
                queries.add(first_query, members)

    @cute.jit
    def clear(self, memory: Memory, keys, tid):
        """The table's words for so many keys."""
        words = cutlass.min((keys + self.per_word - 1) // self.per_word, TABLE_WORDS)
        zeros = cute.make_rmem_tensor((4,), Int32)
        zeros.fill(0)
        for i in cutlass.range(tid, (words + 3) // 4, THREADS, unroll=1):
            cute.autovec_copy(zeros, cute.local_tile(memory.table, (4,), (i,)))

    @cute.jit
    def place(self, key, keys, first, sample: cutlass.Constexpr):
        """(word, shift) of a key in the table, and whether it is there."""
        at = key - first
        inside = key >= 0 and key < keys and at >= 0 and at < self.range
        if const_expr(sample):
            at = key // SAMPLE
            inside = key >= 0 and key < keys and key % SAMPLE == 0 and at < self.range
        return at // self.per_word, at % self.per_word * self.size, inside

    @cute.jit
    def insert(self, indices, ends, first_query, keys, first, memory: Memory, warp, lane, sample: cutlass.Constexpr):
        """Set the members' bits of the keys from `first` on, or of the sample, and count."""
        selected, different, repeated = Int32(0), Int32(0), Int32(0)
        for m in cutlass.range_constexpr(self.size):
            for i in cutlass.range(warp * 32 + lane, ends[m], THREADS, unroll=UNROLL):
                key = indices[first_query + m, 0, i]
                word, shift, inside = self.place(key, keys, first, sample)
                if const_expr(sample):
                    if key >= 0 and key < keys:
                        selected += 1
                if inside:
                    old = Uint32(
                        cute.arch.atomic_or(
                            memory.table.iterator + word, Int32(1) << (shift + m), sem="relaxed", scope="cta"
                        )
                    )
                    old = (old >> Uint32(shift)) & ((1 << self.size) - 1)
                    if old == 0:
                        different += 1
                    if (old >> Uint32(m)) & 1 != 0:
                        repeated += 1
        for n, count in enumerate((selected, different, repeated)):
            total = cute.arch.warp_redux_sync(count, "add")
            if lane == 0 and total > 0:
                cute.arch.atomic_add(memory.found.iterator + n, total, sem="relaxed", scope="cta")

    @cute.jit
    def entry(self, indices, query, m: cutlass.Constexpr, i, end, keys, first, memory: Memory):
        """(the entry that index i of the group's m-th query is, whether it is one)."""
        key, is_entry = Int32(-1), cutlass.Boolean(False)
        if i < end:
            key = indices[query, 0, i]
        word, shift, inside = self.place(key, keys, first, False)
        members = Uint32(0)
        if inside:
            members = (Uint32(memory.table[word]) >> Uint32(shift)) & ((1 << self.size) - 1)
            is_entry = members & ((2 << m) - 1) == 1 << m
        return key | Int32(members << MEMBER_SHIFT), is_entry

    @cute.jit
    def append(self, lists, indices, ends, first_query, keys, first, group, length, memory: Memory, warp, lane):
        """Entries for the keys from `first` on, behind `length` of them. -> how many."""
        own = Int32(0)
        for m in cutlass.range_constexpr(self.size):
            for i in cutlass.range(warp * 32 + lane, ends[m], THREADS, unroll=UNROLL):
                _, is_entry = self.entry(indices, first_query + m, m, i, ends[m], keys, first, memory)
                if is_entry:
                    own += 1
        before, total = block_exclusive_scan(own, memory.sums, lane, warp)
        place = length + cute.arch.shuffle_sync(before, 0)
        for m in cutlass.range_constexpr(self.size):
            for start in cutlass.range(warp * 32, ends[m], THREADS, unroll=UNROLL):
                entry, is_entry = self.entry(indices, first_query + m, m, start + lane, ends[m], keys, first, memory)
                found = Uint32(cute.arch.vote_ballot_sync(is_entry))
                at = place + Int32(cute.arch.popc(found & ((Uint32(1) << Uint32(lane)) - 1)))
                if is_entry and at < lists.shape[2]:
                    lists[group, 0, at] = entry
                place += Int32(cute.arch.popc(found))
        return total


@cached
def compile_selection_union(size: int):
    """-> f(indices [T, 1, K], counts [T] or [1], has_counts, keys, lists [g, 1, width], lengths [g], queued [2], groups
    [g], queries [T]), all int32, g = ceil(T / size); queued: zeros, which become how many are in either queue; lists:
    as wide as the least share of size * K that is given up, or less where the keys are less; keys below
    2^MEMBER_SHIFT. T, K, keys > 0."""
    tokens, groups = cute.sym_int(), cute.sym_int()
    indices = fake(Int32, (tokens, 1, cute.sym_int()), (*strides(2), 1), 4)
    lists = fake(Int32, (groups, 1, cute.sym_int()), (*strides(2), 1), 4)
    vectors = [fake(Int32, (length,), (1,), 4) for length in (groups, 2, groups, tokens)]
    counts = fake(Int32, (cute.sym_int(),), (1,), 4)
    return compile_sm90(
        *(SelectionUnionSm90(size), indices, counts, Int32(0), Int32(1), lists, *vectors, fake_stream()),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Every compile function and its arguments that the op can ask for."""
    return [(compile_selection_union, (size,)) for size in sorted(GROUP_SIZES.values())]
