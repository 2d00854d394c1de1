"""How the work of a chunk of slots is cut evenly when keys stay and queries pass by.

A *run* is the slots of a chunk that are of one sequence: neighbours, 128 queries each but for the last. Its flat
(query, head) columns make groups of 64, numbered from its first one. A *block* of keys, `width` of them, is seen by the
run's groups from some number on to the last. All blocks' groups, block after block and run after run, are a line; a CTA
has an even share of it, whatever the lengths. What is cut gets partial results: a CTA has two at most, of the block
that its share begins within and of the one that it ends within.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.reductions import before_and_all
from dsa.kernels.training.indexer_slots import GROUP, SLOT_ROWS, load_slot

MOST_SLOTS = 1024


@dataclass(frozen=True)
class Run:
    """first, end: its slots; columns: all of them; groups: of columns; visible: keys that its last query sees; blocks:
    of these keys."""

    first: Int32
    end: Int32
    first_q: Int32
    first_k: Int32
    keys: Int32
    seen: Int32
    step: Int32
    columns: Int32
    groups: Int32
    visible: Int32
    blocks: Int32


class RunWalk:
    """Of index heads `heads`, a power of two up to 64, and blocks of `width` keys."""

    def __init__(self, heads: int, width: int):
        self.heads, self.width = heads, width
        self.slot_groups = SLOT_ROWS * heads // GROUP

    @cute.jit
    def first_group(self, seen, step, key):
        """The first group of a run that sees `key`, if any does."""
        return cutlass.max(key - seen + 1, 0) * step * self.heads // GROUP

    @cute.jit
    def load_run(self, slots, first, lane) -> Run:
        """The run whose first slot is number `first`. A warp's work."""
        count = slots.shape[0]
        slot = load_slot(slots, cutlass.min(first, count - 1))
        end, found = first, Int32(32)
        while found == 32:
            own = end + lane
            same = Int32(0)
            if own < count:
                same = Int32(1) if slots[own, 7] == slot.sequence else Int32(0)
            # The lanes of this run come first.
            found = cute.arch.popc(cute.arch.vote_ballot_sync(same == 1))
            end += found
        last = load_slot(slots, cutlass.max(end - 1, 0))
        columns = ((end - first - 1) * SLOT_ROWS + last.rows) * self.heads
        visible = last.visible(last.rows - 1)
        if first >= count or last.rows <= 0:
            columns, visible = Int32(0), Int32(0)
        return Run(
            first,
            end,
            slot.first_q,
            slot.first_k,
            slot.keys,
            slot.seen,
            slot.step,
            columns,
            cute.ceil_div(columns, GROUP),
            visible,
            cute.ceil_div(visible, self.width),
        )

    @cute.jit
    def share(self, slots, before, sums, found, cta, ctas, tid, threads: cutlass.Constexpr, warp, lane):
        """(first slot of the run in which this CTA's share begins, where in the run's line it does, its groups).

        before  Int32 [MOST_SLOTS], sums [32], zeros, found [3] of shared memory. All threads' work
        """
        count = slots.shape[0]
        total = Int32(0)
        for first in cutlass.range(0, count, threads, unroll=1):
            own = Int32(0)
            index = first + tid
            if index < count:
                slot = load_slot(slots, index)
                if slot.rows > 0:
                    blocks = cute.ceil_div(slot.visible(slot.rows - 1), self.width)
                    groups = cute.ceil_div(slot.rows * self.heads, GROUP)
                    own = blocks * groups
                    if blocks > 0:
                        # Of the blocks that a slot sees, its first rows may not see the last.
                        own -= self.first_group(slot.seen, slot.step, (blocks - 1) * self.width)
            ahead, of_all = before_and_all(own, sums, lane, warp)
            if index < count:
                before[index] = total + ahead
            total += of_all
            cute.arch.sync_threads()
        begin = total // ctas * cta + cutlass.min(total % ctas, cta)
        length = total // ctas + (Int32(1) if cta < total % ctas else Int32(0))
        if tid == 0:
            found[0] = 0
            found[1] = 0
        cute.arch.sync_threads()
        for first in cutlass.range(0, count, threads, unroll=1):
            index = first + tid
            if index < count:
                following = total
                if index + 1 < count:
                    following = before[index + 1]
                if before[index] <= begin and begin < following:
                    found[0] = slots[index, 7]
        cute.arch.sync_threads()
        for first in cutlass.range(0, count, threads, unroll=1):
            index = first + tid
            if index < count:
                if slots[index, 7] == found[0]:
                    previous = Int32(-2)
                    if index > 0:
                        previous = slots[index - 1, 7]
                    if previous != found[0]:
                        found[1] = index
        cute.arch.sync_threads()
        return found[1], begin - before[found[1]], length

    @cute.jit
    def locate(self, run: Run, offset):
        """(block, group) of a place in a run's line."""
        # The blocks that the run's first query sees count all groups.
        whole = run.blocks
        if run.step > 0:
            whole = cutlass.min((cutlass.max(run.seen, 0) + self.width - 1) // self.width, run.blocks)
        block, left = Int32(0), offset
        if run.groups > 0:
            block = cutlass.min(offset // run.groups, whole)
            left = offset - block * run.groups
        looking = Int32(1)
        while looking == 1:
            length = run.groups - self.first_group(run.seen, run.step, block * self.width)
            looking = Int32(0)
            if left >= length and block + 1 < run.blocks:
                left -= length
                block += 1
                looking = Int32(1)
        return block, self.first_group(run.seen, run.step, block * self.width) + left

    @cute.jit
    def begin(self, run: Run, block, group):
        """The group to go on with: `group`, or if that is -1 the first that sees the block."""
        own = self.first_group(run.seen, run.step, block * self.width)
        return own if group < 0 else group

    @cute.jit
    def end(self, run: Run, block, group, left):
        """Where the groups of a block end, or the `left` that a share still has."""
        end = cutlass.min(run.groups, group + left)
        return group if block >= run.blocks else end

    @cute.jit
    def following(self, run: Run, slots, block, left):
        """Behind a block: (first slot of its run, block, -1, what is left of the share)."""
        first, block = (run.end, Int32(0)) if block + 1 >= run.blocks else (run.first, block + 1)
        return first, block, Int32(-1), (Int32(0) if first >= slots.shape[0] else left)
