"""Find groups of adjacent queries that share enough keys, and list the union of a group's selected keys.

lists[g, 0, :lengths[g]] = key | members << MEMBER_SHIFT, one entry per key of the union

Group g is the `size` adjacent queries from g * size on. The members of a key are the queries of the group that have
selected it: bit m is query g * size + m.

The queries of a group go to the queue of single queries if the union has more keys than MOST_UNION (a fraction) times
the total number of these queries' valid indices, or if a query lists a key twice. Otherwise the group goes to the queue
of groups (tile_scheduler.py).

Work
- A CTA handles one group, in rounds. Its table in shared memory, TABLE_WORDS words, has `size` bits per key, the key's
  members. A round covers the range of keys that fits in the table. For each index in the range the CTA sets the bit of
  the index's query by atomicOr.
- Then the CTA makes an entry for each selected key of the range. If several queries of the group have selected the key,
  the entry is made at the index of the lowest member, so each key is listed once. A scan over the warps' counts gives
  the positions; a warp writes the entries of 32 indices at a time.
- Before the rounds, the CTA estimates the size of the union from a sample: it sets the bits of the selected keys that
  are multiples of SAMPLE, in the same table, and counts these keys. This needs only one pass over the indices and
  rejects most groups that share too little. A wrong estimate costs only time. The union of a group that selects only
  multiples of SAMPLE is estimated SAMPLE times too large, so the group is never computed together. A group that selects
  no multiple of SAMPLE always passes, and its union is counted in full.
- The op groups queries only if there are at most 2^21 keys (`dsa.ops.mla._shared_keys`). With more keys there would be
  too many rounds: a round reads all indices of the group three times, even if none is in the round's range. For groups
  of 8 the table of the sample also has no room for more keys.
Order of a list: by round, then by the warp that reads the index, then by member. The order depends only on the group's
selections.
Warp roles: none, all warps do the same. Launch: programmatic dependent launch.
Roofline: bound by memory, 4 bytes per index. 4096 queries with 2048 indices each take 13 us if no group passes the
sample. A group that passes takes 6000 cycles more.
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
from dsa.kernels.mla.limits import GROUP_SIZES, MEMBER_SHIFT, MOST_UNION
from dsa.kernels.mla.tile_scheduler import Queue
from dsa.runtime.compile_cache import cached, compile_sm90

THREADS, WARPS = 512, 16
TABLE_WORDS = 16384
SAMPLE = 32
# Limit of the estimated size of the union, in percent of the largest union that MOST_UNION allows. If the estimate from
# the sample is above the limit, the group's queries go to the queue of single queries. The limit is above 100 because
# the estimate is not exact.
SLACK = 110
UNROLL = 4


@dataclass(frozen=True)
class Memory:
    """Shared memory.

    table  [TABLE_WORDS]: the members of the keys of a round or of the sample, `size` bits per key
    sums   [32]: scratch of the scan: counts per warp, 0 past the CTA's warps
    found  [4] counts over the CTA. found[0]: valid indices. found[1]: distinct keys, of the sample or of the rounds so
           far. found[2]: indices of keys that the query has listed before. found[3] is unused
    """

    table: cute.Tensor
    sums: cute.Tensor
    found: cute.Tensor


class SelectionUnionSm90:
    """The kernel for groups of `size` queries, 4 or 8."""

    def __init__(self, size: int):
        self.size = size
        self.per_word = 32 // size
        self.range = TABLE_WORDS * self.per_word  # keys per round

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
        """Zero the part of the table that `keys` keys need."""
        words = cutlass.min((keys + self.per_word - 1) // self.per_word, TABLE_WORDS)
        zeros = cute.make_rmem_tensor((4,), Int32)
        zeros.fill(0)
        for i in cutlass.range(tid, (words + 3) // 4, THREADS, unroll=1):
            cute.autovec_copy(zeros, cute.local_tile(memory.table, (4,), (i,)))

    @cute.jit
    def place(self, key, keys, first, sample: cutlass.Constexpr):
        """Return (word, shift, whether the table covers the key). The key's bits are in table[word], from bit `shift`
        on. In a round the table covers `range` keys from `first` on. With `sample` it covers multiples of SAMPLE. keys:
        number of keys of the cache."""
        at = key - first
        inside = key >= 0 and key < keys and at >= 0 and at < self.range
        if const_expr(sample):
            at = key // SAMPLE
            inside = key >= 0 and key < keys and key % SAMPLE == 0 and at < self.range
        return at // self.per_word, at % self.per_word * self.size, inside

    @cute.jit
    def insert(self, indices, ends, first_query, keys, first, memory: Memory, warp, lane, sample: cutlass.Constexpr):
        """Set the bits of the keys' members in the table. The keys are those of the sample if `sample`, otherwise those
        of the round that begins at `first`. Update `memory.found`. ends: number of indices of each query."""
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
        """Return (entry, whether to append it to the list) for the key that index i of the group's m-th query names.

        The entry is the key with its members, the queries of the group that selected it. Each key is listed once: it is
        appended only for its lowest member, and only in the round whose range, from `first` on, contains the key.
        """
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
        """Append the entries of a round, whose keys begin at `first`, to the group's list, which has `length` entries.

        Return the number of new entries. Entries for which the list has no room are counted but dropped.
        """
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
    """Compile f(indices [T, 1, K], counts [T] or [1], has_counts, keys, lists [g, 1, width], lengths [g],
    queued [2], groups [g], queries [T]), all int32, with g = ceil(T / size).

    keys     number of keys of the cache; an index that is negative or at least `keys` is ignored
    counts   if has_counts > 0, [T]: only the first counts[t] indices of query t are used. Otherwise [1], and not read
    width    at least the longest list of a group that is computed together: MOST_UNION of size * K, or `keys` if that
             is less
    queued   zeros before the launch. The kernel adds the number of queued groups to queued[0], and the number of queued
             single queries to queued[1]
    groups   the queue of groups: the first queued[0] entries are written
    queries  the queue of single queries: the first queued[1] entries are written

    T, K > 0; 0 < keys < 2^MEMBER_SHIFT.
    """
    tokens, groups = cute.sym_int(), cute.sym_int()
    return compile_sm90(
        SelectionUnionSm90(size),
        fake(Int32, (tokens, 1, cute.sym_int()), (*strides(2), 1), 4),
        fake(Int32, (cute.sym_int(),), (1,), 4),
        *(Int32(0), Int32(1)),
        fake(Int32, (groups, 1, cute.sym_int()), (*strides(2), 1), 4),
        *(fake(Int32, (length,), (1,), 4) for length in (groups, 2, groups, tokens)),
        fake_stream(),
    )


def shipped_variants() -> list[tuple[Callable[..., Any], tuple]]:
    """Return every (compile function, arguments) that the op can ask for."""
    return [(compile_selection_union, (size,)) for size in sorted(GROUP_SIZES.values())]
