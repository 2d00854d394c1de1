"""The k largest of scores that lie in the shared memory of several CTAs, exactly, by counting digits.

The CTAs of a group have a part of a sequence's keys each, and of each of its queries the scores of these. A score's
bits, as a signed number that is ordered as scores are, are three digits, of 12, 10 and 10 bits.
- Each CTA counts the first digit of its scores in shared memory and adds what it has to the query's counts in global
  memory. When all of the group have (`meet`), each reads the counts and finds the digit of the k-th largest, how many
  scores are above it and how many have it (`find`).
- While more have it than the list has room for, and not all of them are selected, the same with the next digit, of
  those scores alone.
- Each lists the scores with this digit, the bits behind the digit beside its own number, and tells how many of its
  scores are above and how many have it (`publish`). When all have, each finds the k-th largest in the list by itself,
  and from the list and the numbers of the CTAs before it how many they select, so where its own begin. It selects and
  writes them (`finish`). Of more equal scores than are needed, the first: those of the CTAs before come first.
So there are two meetings, and one more for each further digit, where more scores than the list holds share the digits
before it.

A query's workspace: header (arrivals, entries of the list, CTAs that are through), counts of each digit, two numbers of
each CTA (scores above, scores with the digit), and the list. It is zero at first, and is left so but for the CTAs'
numbers and the list, which are written before they are read: each CTA zeroes a part of the counts when all have read
them, and the last one that is through the last meeting the header.

A CTA waits for the others of its group, so all must run at once. One that waits in vain, as with a workspace that was
not zero, writes no results: their places stay as they were, or are -1.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr

from dsa.cute.limits import MAX_SLOTS
from dsa.cute.reductions import warp_inclusive_scan
from dsa.cute.sm90 import WARP
from dsa.kernels.indexer.limits import PAGED, VALUES
from dsa.kernels.indexer.paged_select_plan import (
    BINS,
    ENTRIES,
    FIRST_BIN,
    FIRST_CTA,
    FIRST_ENTRY,
    MAX_CTAS,
    SHIFTS,
    teams_of,
)
from dsa.kernels.indexer.radix_select import bits_of
from dsa.kernels.indexer.score_tile import TILE
from dsa.kernels.indexer.topk_candidates import MINUS_INFINITY, NAN

BARRIER = 2  # named barrier of all threads that select; the next numbers are the teams' own
ARRIVALS, LISTED, THROUGH = 0, 1, 2  # of a header
ALL, NOTHING = -(2**30), 2**31 - 1  # digits below and not below every score's
MOST_TRIES = 2**22  # of waiting for the others: seconds
VECTOR = 4  # scores that a thread has at a time
LOW = SHIFTS[0]  # bits behind the first digit
SMALL_WORDS = 68


class Group(NamedTuple):
    """Of a CTA: its sequence, its number among the sequence's `members`, its first key tile and how many it has."""

    sequence: Int32
    member: Int32
    members: Int32
    first: Int32
    tiles: Int32


class Found(NamedTuple):
    """The k-th largest score is the rank-th largest of the `inside` scores whose bits, shifted right by `shift`, are
    `prefix`; `above` scores are larger than all of these. A prefix of ALL: there are no more than k scores."""

    prefix: Int32
    shift: Int32
    above: Int32
    inside: Int32
    rank: Int32


@dataclass(frozen=True)
class SelectionMemory:
    """Shared memory. found: a Found of each query; in_vain [1]: not 0 where a wait was. Of the team: counts of digits;
    sums of scans; digit [2], what a pass over the list found; cursor [1], of the list."""

    found: cute.Tensor
    in_vain: cute.Tensor
    counts: cute.Tensor
    sums: cute.Tensor
    digit: cute.Tensor
    cursor: cute.Tensor

    @staticmethod
    def of(found: cute.Pointer, small: cute.Pointer, counts: cute.Pointer, queries: int, team) -> "SelectionMemory":
        """found: FOUND_WORDS a query; small: 4 words and SMALL_WORDS a team; counts: BINS[0] words a team."""
        own, layout = small + 4 + SMALL_WORDS * team, cute.make_layout
        return SelectionMemory(
            cute.make_tensor(found, layout((FOUND_WORDS, queries))),
            cute.make_tensor(small, layout(1)),
            cute.make_tensor(counts + BINS[0] * team, layout(BINS[0])),
            cute.make_tensor(own, layout((2, 32), stride=(32, 1))),
            cute.make_tensor(own + 64, layout(2)),
            cute.make_tensor(own + 66, layout(1)),
        )


@cute.jit
def ordered(x: Float32) -> Int32:
    """The bits of x, which is not -0.0, as a number that is ordered as scores are."""
    bits = Int32(bits_of(x))
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@cute.jit
def lowest_bit(bits: Int32) -> Int32:
    """Which bit is the lowest one of those set."""
    return Int32(cute.arch.popc((bits & -bits) - 1))


@cute.jit
def address(words: cute.Tensor, at) -> Int64:
    return Int64((words.iterator + at).toint())


@cute.jit
def add(place: Int64, number: Int32):
    cute.arch.inline_ptx("red.relaxed.gpu.global.add.u32 [{$r0}], {$r1};", read_only_args=[place, number])


@cute.jit
def arrive_at(place: Int64):
    """What this thread knows to be written is visible to whoever sees the arrival."""
    cute.arch.inline_ptx("red.release.gpu.global.add.u32 [{$r0}], 1;", read_only_args=[place])


@cute.jit
def arrivals_at(place: Int64) -> Int32:
    return cute.arch.inline_ptx(
        "ld.acquire.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[place]
    )


FOUND_WORDS = len(Found._fields)


class SelectionOverCtas:
    """threads: how many of the CTA's threads select, from its first on; queries: of each sequence; page: keys of one.

    Queries are selected side by side, each by a team of threads.
    """

    def __init__(self, threads: int, queries: int, page: int):
        self.all_threads, self.queries, self.page = threads, queries, page
        self.teams = teams_of(threads, queries)
        self.threads = threads // self.teams
        self.warps = self.threads // WARP

    @cute.jit
    def sync_all(self):
        """A barrier of all threads that select."""
        cute.arch.barrier(barrier_id=BARRIER, number_of_threads=self.all_threads)

    @cute.jit
    def sync(self, team):
        """A barrier of the team."""
        cute.arch.barrier(barrier_id=BARRIER + 1 + team, number_of_threads=self.threads)

    @cute.jit
    def scan(self, own, memory: SelectionMemory, turn, team, tid):
        """-> (the sum of `own` over the team's threads before this one, the sum over all of them). One barrier, of the
        team, behind which and another one the turn's sums may be used again."""
        lane, warp = tid % WARP, tid // WARP
        scanned = warp_inclusive_scan(own, lane)
        if lane == WARP - 1:
            memory.sums[turn, warp] = scanned
        self.sync(team)
        of_lane = memory.sums[turn, lane]
        before = cute.arch.warp_redux_sync(of_lane if lane < warp else Int32(0), "add")
        return before + scanned - own, cute.arch.warp_redux_sync(of_lane, "add")

    def found(self, memory: SelectionMemory, query) -> Found:
        return Found(*(memory.found[i, query] for i in range(len(Found._fields))))

    @cute.jit
    def keep(self, memory: SelectionMemory, query, found: Found):
        for i in cutlass.range_constexpr(len(Found._fields)):
            memory.found[i, query] = found[i]

    @cute.jit
    def select(
        self,
        group: Group,
        scores: cute.Tensor,
        workspace: cute.Tensor,
        block_table: cute.Tensor,
        indices: cute.Tensor,
        values: cute.Tensor,
        options: Int32,
        memory: SelectionMemory,
        team,
        tid,
    ):
        """scores: [keys, queries], of the group's tiles; tid: of the team; the others as the kernel has them."""
        k, first_row = indices.shape[1], group.sequence * self.queries
        leads = team == 0 and tid == 0
        if tid < 64:
            memory.sums[tid // WARP, tid % WARP] = Int32(0)
        if leads:
            memory.in_vain[0] = Int32(0)
        self.sync_all()  # what is written from here on may lie in keys' place
        for query in cutlass.range(team, self.queries, self.teams, unroll=1):
            self.count(0, group, scores[None, query], workspace[first_row + query, None], memory, query, team, tid)
        arrivals = self.meet(group, workspace[first_row, None], Int32(0), memory, leads)
        for query in cutlass.range(team, self.queries, self.teams, unroll=1):
            self.find(0, workspace[first_row + query, None], k, memory, query, team, tid)
        for level in cutlass.range_constexpr(1, len(BINS)):
            self.sync_all()
            crowded = Int32(0)
            for query in cutlass.range_constexpr(self.queries):
                crowded |= Int32(1 << query) if self.is_crowded(self.found(memory, query)) else 0
            if crowded != 0:
                for query in cutlass.range(team, self.queries, self.teams, unroll=1):
                    if (crowded >> query) & 1 != 0:
                        words = workspace[first_row + query, None]
                        self.count(level, group, scores[None, query], words, memory, query, team, tid)
                arrivals = self.meet(group, workspace[first_row, None], arrivals, memory, leads)
                for query in cutlass.range(team, self.queries, self.teams, unroll=1):
                    if (crowded >> query) & 1 != 0:
                        self.find(level, workspace[first_row + query, None], k, memory, query, team, tid)
        for query in cutlass.range(team, self.queries, self.teams, unroll=1):
            self.publish(group, scores[None, query], workspace[first_row + query, None], memory, query, team, tid)
        self.meet(group, workspace[first_row, None], arrivals, memory, leads)
        through = self.clear_counts(group, workspace, first_row, memory, team, tid)
        for query in cutlass.range(team, self.queries, self.teams, unroll=1):
            row = first_row + query
            self.finish(
                *(group, scores[None, query], workspace[row, None], block_table[group.sequence, None]),
                *(indices[row, None], values[row, None], options, memory, query, team, tid),
            )
        if through == group.members - 1:
            zero = cute.make_rmem_tensor((4,), Int32)
            zero.fill(0)
            for query in cutlass.range(self.queries, unroll=1):
                cute.autovec_copy(zero, cute.local_tile(workspace[first_row + query, None], (4,), (0,)))

    @cute.jit
    def is_crowded(self, found: Found) -> bool:
        """Whether the digit does not say yet which are selected, and too many have it for the list."""
        return found.inside > ENTRIES and found.inside > found.rank

    @cute.jit
    def count(
        self,
        level: cutlass.Constexpr,
        group: Group,
        scores: cute.Tensor,
        words: cute.Tensor,
        memory: SelectionMemory,
        query,
        team,
        tid,
    ):
        """Add the digits of this CTA's scores to the query's counts."""
        self.clear(memory, BINS[level], tid)
        self.sync(team)
        prefix = Int32(0)
        if const_expr(level > 0):
            prefix = memory.found[0, query]
        x = cute.make_rmem_tensor((VECTOR,), Float32)
        for i in cutlass.range(tid, group.tiles * (TILE // VECTOR), self.threads, unroll=1):
            cute.autovec_copy(cute.local_tile(scores, (VECTOR,), (i,)), x)
            for j in cutlass.range_constexpr(VECTOR):
                number = ordered(x[j])
                counts = x[j] == x[j]
                if const_expr(level == 0):
                    digit = (number >> SHIFTS[0]) + BINS[0] // 2
                else:
                    digit = (number >> SHIFTS[level]) & (BINS[level] - 1)
                    counts = counts and (number >> SHIFTS[level - 1]) == prefix
                if counts:
                    cute.arch.atomic_add(memory.counts.iterator + digit, Int32(1), scope="cta")
        self.sync(team)
        four = cute.make_rmem_tensor((4,), Int32)
        for i in cutlass.range(tid, BINS[level] // 4, self.threads, unroll=1):
            cute.autovec_copy(cute.local_tile(memory.counts, (4,), (i,)), four)
            for j in cutlass.range_constexpr(4):
                if four[j] > 0:
                    add(address(words, FIRST_BIN[level] + 4 * i + j), four[j])
        self.sync(team)

    @cute.jit
    def meet(self, group: Group, words: cute.Tensor, arrivals: Int32, memory: SelectionMemory, leads) -> Int32:
        """Wait until all CTAs of the group are here, and what they have written is visible. -> arrivals by then."""
        self.sync_all()
        arrivals += group.members
        if leads:
            place = address(words, ARRIVALS)
            arrive_at(place)
            here, tries = arrivals_at(place), Int32(0)
            while here < arrivals and tries < MOST_TRIES and memory.in_vain[0] == 0:
                here = arrivals_at(place)
                tries += 1
            if here < arrivals:
                memory.in_vain[0] = Int32(1)
        self.sync_all()
        return arrivals

    @cute.jit
    def find(self, level: cutlass.Constexpr, words: cute.Tensor, k, memory: SelectionMemory, query, team, tid):
        """Find the digit of the k-th largest in the query's counts."""
        found = Found(Int32(0), Int32(32), Int32(0), Int32(0), k)
        if const_expr(level > 0):
            found = self.found(memory, query)
        # A thread has neighbouring digits, the first one the largest.
        bins, vectors = BINS[level], -(-BINS[level] // (4 * self.threads))
        four, own = cute.make_rmem_tensor((4,), Int32), Int32(0)
        counts = cute.make_rmem_tensor((4, vectors), Int32)
        for v in cutlass.range_constexpr(vectors):
            at = bins // 4 - 1 - (tid * vectors + v)
            # Without a branch, so that several loads are under way.
            cute.autovec_copy(cute.local_tile(words, (4,), (FIRST_BIN[level] // 4 + cutlass.max(at, 0),)), four)
            for j in cutlass.range_constexpr(4):
                counts[j, v] = four[3 - j] if at >= 0 else Int32(0)
                own += counts[j, v]
        before, total = self.scan(own, memory, level & 1, team, tid)
        if const_expr(level == 0):
            if tid == 0 and total <= k:
                self.keep(memory, query, Found(Int32(ALL), Int32(SHIFTS[0]), total, Int32(0), Int32(0)))
        if before < found.rank and found.rank <= before + own and (level > 0 or total > k):
            position, inside = Int32(0), Int32(0)
            for i in cutlass.range_constexpr(4 * vectors):
                here = counts[i % 4, i // 4]
                if inside == 0:
                    if before + here >= found.rank:
                        position, inside = Int32(i), here
                    else:
                        before += here
            digit = bins - 1 - (tid * 4 * vectors + position)
            prefix = digit - bins // 2 if const_expr(level == 0) else found.prefix * bins + digit
            now = Found(prefix, Int32(SHIFTS[level]), found.above + before, inside, found.rank - before)
            self.keep(memory, query, now)
        self.sync(team)

    @cute.jit
    def publish(self, group: Group, scores: cute.Tensor, words: cute.Tensor, memory: SelectionMemory, query, team, tid):
        """Write how many of this CTA's scores are above the digit and how many have it, and list those if they are to
        be compared."""
        found = self.found(memory, query)
        lists = found.inside > found.rank and found.inside <= ENTRIES
        if tid == 0:
            memory.cursor[0] = Int32(0)
        self.sync(team)
        x = cute.make_rmem_tensor((VECTOR,), Float32)
        own = Int32(0)  # two counts in one scan
        for i in cutlass.range(tid, group.tiles * (TILE // VECTOR), self.threads, unroll=1):
            cute.autovec_copy(cute.local_tile(scores, (VECTOR,), (i,)), x)
            have = Int32(0)
            for j in cutlass.range_constexpr(VECTOR):
                digits = ordered(x[j]) >> found.shift
                if x[j] == x[j]:
                    own += Int32(1) if digits > found.prefix else 0
                    have |= Int32(1 << j) if digits == found.prefix else 0
            own += Int32(cute.arch.popc(have)) << 16
            while lists and have != 0:
                j = lowest_bit(have)
                have &= have - 1
                at = cute.arch.atomic_add(memory.cursor.iterator, Int32(1), scope="cta")
                if at < BINS[0]:
                    memory.counts[at] = (ordered(scores[i * VECTOR + j]) << (32 - LOW)) | group.member
        _, total = self.scan(own, memory, 1, team, tid)
        above, inside = total & 0xFFFF, Int32(Uint32(total) >> Uint32(16))
        if tid == 0:
            if lists and inside > 0:
                memory.cursor[0] = cute.arch.atomic_add(words.iterator + LISTED, inside, sem="relaxed", scope="gpu")
            words[FIRST_CTA + group.member] = above
            words[FIRST_CTA + MAX_CTAS + group.member] = inside
        if lists and inside > 0:
            self.sync(team)
            begin = cutlass.max(memory.cursor[0], 0)
            for i in cutlass.range(tid, cutlass.min(inside, ENTRIES - begin), self.threads, unroll=1):
                words[FIRST_ENTRY + begin + i] = memory.counts[i]
        self.sync(team)

    @cute.jit
    def clear_counts(self, group: Group, workspace: cute.Tensor, first_row, memory: SelectionMemory, team, tid):
        """This CTA's part of the counts, which all have read once all are here. -> how many CTAs are through before."""
        zero = cute.make_rmem_tensor((4,), Int32)
        zero.fill(0)
        through = Int32(-1)
        if team == 0 and tid == 0:
            place = workspace[first_row, None].iterator + THROUGH
            through = cute.arch.atomic_add(place, Int32(1), sem="relaxed", scope="gpu")
        for query in cutlass.range(team, self.queries, self.teams, unroll=1):
            words, shift = workspace[first_row + query, None], memory.found[1, query]
            for level in cutlass.range_constexpr(len(BINS)):
                if shift <= SHIFTS[level]:
                    for i in cutlass.range(
                        group.member * self.threads + tid, BINS[level] // 4, group.members * self.threads, unroll=1
                    ):
                        cute.autovec_copy(zero, cute.local_tile(words, (4,), (FIRST_BIN[level] // 4 + i,)))
        return through

    @cute.jit
    def finish(
        self,
        group: Group,
        scores: cute.Tensor,
        words: cute.Tensor,
        table: cute.Tensor,
        indices: cute.Tensor,
        values: cute.Tensor,
        options: Int32,
        memory: SelectionMemory,
        query,
        team,
        tid,
    ):
        """Select this CTA's scores and write their keys to where they belong."""
        found = self.found(memory, query)
        if memory.in_vain[0] != 0:
            found = Found(Int32(NOTHING), Int32(0), Int32(0), Int32(0), Int32(0))
        compares = found.inside > found.rank and found.inside <= ENTRIES
        entries = cute.make_rmem_tensor((-(-ENTRIES // self.threads),), Int32)
        count = found.inside if compares else Int32(0)
        above, inside = self.take(group, words, entries, count, memory, team, tid)
        # Of the scores with the digit those whose lower bits are above `low` are selected, and `ties` of this CTA's
        # that are equal to it. All of them:
        low, ties, before = Int32(-1), Int32(0), above + inside
        if found.inside > found.rank:
            needed = found.rank
            if compares:
                digit, needed = self.digit_of_rank(entries, count, 32 - 10, Int32(0), needed, memory, 0, team, tid)
                last, needed = self.digit_of_rank(entries, count, 32 - LOW, digit, needed, memory, 1, team, tid)
                low = digit * BINS[2] + last
                larger, inside = self.listed_before(group, entries, count, low, memory, team, tid)
                above += larger
            else:  # they are equal
                low = found.prefix & ((1 << LOW) - 1)
            ties = cutlass.max(needed - inside, 0)
            before = above + cutlass.min(inside, needed)
        self.write(group, scores, table, indices, values, options, found, low, ties, before, memory, team, tid)
        if group.member == 0:
            k = indices.shape[0]
            total = cutlass.min(cutlass.max(found.above + found.rank, 0), k)
            for i in cutlass.range(total + tid, k, self.threads, unroll=1):
                indices[i] = Int32(-1)
                if options & VALUES:
                    values[i] = MINUS_INFINITY

    @cute.jit
    def take(self, group: Group, words: cute.Tensor, entries: cute.Tensor, count, memory: SelectionMemory, team, tid):
        """The query's list, of `count` entries, to registers: of a thread those `threads` apart. -> (scores above the
        digit, scores that have it, of the CTAs before)"""
        above, inside, places = Int32(0), Int32(0), -(-MAX_CTAS // self.threads)
        numbers = cute.make_rmem_tensor((2, places), Int32)
        # All loads first, so that their latency shows once.
        for i in cutlass.range_constexpr(places):
            cta = cutlass.min(tid + i * self.threads, MAX_CTAS - 1)
            for j in cutlass.range_constexpr(2):
                numbers[j, i] = words[FIRST_CTA + j * MAX_CTAS + cta]
        for i in cutlass.range_constexpr(cute.size(entries)):
            entries[i] = Int32(0)
            if tid + i * self.threads < count:
                entries[i] = words[FIRST_ENTRY + tid + i * self.threads]
        self.sync(team)
        self.clear(memory, BINS[2], tid)
        for i in cutlass.range_constexpr(places):
            if tid + i * self.threads < group.member:
                above += numbers[0, i]
                inside += numbers[1, i]
        _, above = self.scan(above, memory, 0, team, tid)
        _, inside = self.scan(inside, memory, 1, team, tid)
        return above, inside

    @cute.jit
    def clear(self, memory: SelectionMemory, bins: cutlass.Constexpr, tid):
        zero = cute.make_rmem_tensor((4,), Int32)
        zero.fill(0)
        for i in cutlass.range(tid, bins // 4, self.threads, unroll=2):
            cute.autovec_copy(zero, cute.local_tile(memory.counts, (4,), (i,)))

    @cute.jit
    def digit_of_rank(
        self,
        entries: cute.Tensor,
        count,
        shift: cutlass.Constexpr,
        prefix: Int32,
        rank: Int32,
        memory: SelectionMemory,
        turn: cutlass.Constexpr,
        team,
        tid,
    ):
        """Of the list's entries whose bits above the ten at `shift` are `prefix`: the ten of the one of this rank, and
        its rank among those that have them. The counts are zero before and behind it, and behind a barrier."""
        bins = BINS[2]
        for i in cutlass.range_constexpr(cute.size(entries)):
            digits = Int32(Uint32(entries[i]) >> Uint32(shift))
            if tid + i * self.threads < count and digits // bins == prefix:
                cute.arch.atomic_add(memory.counts.iterator + digits % bins, Int32(1), scope="cta")
        self.sync(team)
        # A thread has neighbouring digits, the first one the largest.
        own = bins // self.threads
        counts, total = cute.make_rmem_tensor((own,), Int32), Int32(0)
        for i in cutlass.range_constexpr(own):
            at = bins - 1 - (tid * own + i)
            counts[i] = memory.counts[at]
            memory.counts[at] = Int32(0)
            total += counts[i]
        before, _ = self.scan(total, memory, turn, team, tid)
        for i in cutlass.range_constexpr(own):
            if before < rank and rank <= before + counts[i]:
                memory.digit[0] = bins - 1 - (tid * own + i)
                memory.digit[1] = rank - before
            before += counts[i]
        self.sync(team)
        return memory.digit[0], memory.digit[1]

    @cute.jit
    def listed_before(self, group: Group, entries: cute.Tensor, count, low, memory: SelectionMemory, team, tid):
        """(How many of the list's entries of CTAs before are above `low`, how many equal to it.)"""
        counts = Int32(0)
        for i in cutlass.range_constexpr(cute.size(entries)):
            of_cta, bits = entries[i] & ((1 << (32 - LOW)) - 1), Int32(Uint32(entries[i]) >> Uint32(32 - LOW))
            if tid + i * self.threads < count and of_cta < group.member:
                counts += Int32(1) if bits > low else (Int32(1 << 16) if bits == low else 0)
        _, total = self.scan(counts, memory, 0, team, tid)
        return total & 0xFFFF, total >> 16

    @cute.jit
    def write(
        self,
        group: Group,
        scores: cute.Tensor,
        table: cute.Tensor,
        indices: cute.Tensor,
        values: cute.Tensor,
        options: Int32,
        found: Found,
        low: Int32,
        ties: Int32,
        before: Int32,
        memory: SelectionMemory,
        team,
        tid,
    ):
        """Write this CTA's selected keys in their order, from place `before` on."""
        x = cute.make_rmem_tensor((VECTOR,), Float32)
        taken, equals, k = Int32(0), Int32(0), indices.shape[0]
        vectors = group.tiles * (TILE // VECTOR)
        self.sync(team)
        for base in cutlass.range(0, vectors, self.threads, unroll=1):
            i = base + tid
            for j in cutlass.range_constexpr(VECTOR):
                x[j] = NAN
            if i < vectors:
                cute.autovec_copy(cute.local_tile(scores, (VECTOR,), (i,)), x)
            some, equals_here = Int32(0), Int32(0)  # scores that are above `low`, or equal to it; those that are equal
            for j in cutlass.range_constexpr(VECTOR):
                number = ordered(x[j])
                digits, lower = number >> found.shift, number & ((1 << LOW) - 1)
                has = digits == found.prefix
                if x[j] == x[j]:
                    some |= Int32(1 << j) if digits > found.prefix or (has and lower >= low) else 0
                    equals_here |= Int32(1 << j) if has and lower == low else 0
            equal = Int32(cute.arch.popc(equals_here))
            here = Int32(cute.arch.popc(some)) - equal + (equal << 16)  # two counts in one scan
            earlier, total = self.scan(here, memory, (base // self.threads) & 1, team, tid)
            same = equals + (earlier >> 16)
            place = before + taken + (earlier & 0xFFFF) + cutlass.min(same, ties)
            while some != 0:
                j = lowest_bit(some)
                some &= some - 1
                is_same = (equals_here >> j) & 1 != 0
                if (not is_same or same < ties) and place >= 0 and place < k:
                    index, value = self.slot(table, group.first * TILE + i * VECTOR + j, options), MINUS_INFINITY
                    indices[place] = index
                    if options & VALUES:
                        if index >= 0:
                            value = scores[i * VECTOR + j]
                        values[place] = value
                if not is_same or same < ties:
                    place += 1
                same += Int32(1) if is_same else 0
            taken += total & 0xFFFF
            equals += total >> 16

    @cute.jit
    def slot(self, table: cute.Tensor, key: Int32, options: Int32) -> Int32:
        """What is written for a selected key."""
        index = key
        if options & PAGED:
            physical = table[key // self.page]
            slot = Int64(physical) * self.page + key % self.page
            index = Int32(slot) if physical >= 0 and slot < Int64(MAX_SLOTS) else Int32(-1)
        return index
