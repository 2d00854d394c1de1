"""Units of work handed out as CTAs become free: some neighbouring queries of a slot, and all keys that one of them
sees.

Later queries come first: in a causal batch they see the most, so that short units come last and all CTAs end together.
Which CTA has a unit changes no result. A CTA's loading warp draws a ticket and names the unit to the others in a ring
of two places in shared memory.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.pipeline import advance
from dsa.cute.score_tile import init_ring
from dsa.kernels.training.indexer_slots import SLOT_ROWS, load_slot

PLACES = 2
FIELDS = 8


@dataclass(frozen=True)
class Unit:
    """slot: its number, -1 at the end; row: of the slot, the unit's first; first_q, rows: the slot's; visible: how many
    keys the unit's last query sees."""

    slot: Int32
    row: Int32
    first_q: Int32
    rows: Int32
    visible: Int32


class Units:
    """Of `queries` queries each, a divisor of 128."""

    def __init__(self, queries: int):
        self.queries, self.units_a_slot = queries, SLOT_ROWS // queries

    def storage(self) -> type:
        @cute.struct
        class UnitStorage:
            full: cute.struct.MemRange[cutlass.Int64, PLACES]
            empty: cute.struct.MemRange[cutlass.Int64, PLACES]
            facts: cute.struct.MemRange[Int32, PLACES * FIELDS]

        return UnitStorage

    @cute.jit
    def init(self, storage, readers: cutlass.Constexpr):
        """One thread's work; `readers` warps."""
        init_ring(storage.full.data_ptr(), storage.empty.data_ptr(), PLACES, readers)

    @cute.jit
    def name(self, storage, tickets, slots, place, lane):
        """Draw a unit that has rows and name it to the readers. The loading warp's work.
        -> (the slot's number, -1 if there is no unit left; the slot; the unit's first row; the next place)."""
        count = slots.shape[0]
        number, row, found = Int32(-1), Int32(0), Int32(0)
        while found == 0:
            ticket = Int32(0)
            if lane == 0:
                ticket = cute.arch.atomic_add(tickets.iterator, Int32(1), scope="gpu")
            ticket = cute.arch.shuffle_sync(ticket, 0)
            found = Int32(1)
            if ticket < count * self.units_a_slot:
                number = count - 1 - ticket // self.units_a_slot
                row = (self.units_a_slot - 1 - ticket % self.units_a_slot) * self.queries
                if row >= slots[number, 1]:
                    found = Int32(0)
                    number = Int32(-1)
        slot = load_slot(slots, cutlass.max(number, 0))
        at, phase = place
        cute.arch.mbarrier_wait(storage.empty.data_ptr() + at, phase ^ 1)
        if lane == 0:
            facts = storage.facts.get_tensor(cute.make_layout((FIELDS, PLACES)))
            values = (number, row, slot.first_q, slot.rows, slot.seen_by(row, self.queries))
            for i in cutlass.range_constexpr(len(values)):
                facts[i, at] = values[i]
            cute.arch.mbarrier_arrive(storage.full.data_ptr() + at)
        cute.arch.sync_warp()
        return number, slot, row, advance(at, phase, PLACES)

    @cute.jit
    def read(self, storage, place):
        """The next unit, and the next place. A math warp's work."""
        at, phase = place
        cute.arch.mbarrier_wait(storage.full.data_ptr() + at, phase)
        facts = storage.facts.get_tensor(cute.make_layout((FIELDS, PLACES)))
        unit = Unit(*[facts[i, at] for i in range(5)])
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(storage.empty.data_ptr() + at)
        return unit, advance(at, phase, PLACES)


def fake_tickets() -> cute.Tensor:
    """int32 [1], 0 before the launch."""
    return cute.runtime.make_fake_tensor(Int32, (1,), (1,), assumed_align=4)
