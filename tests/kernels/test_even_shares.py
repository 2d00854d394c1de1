"""How work is divided: the functions that kernels call, run on the host."""

import cutlass
import cutlass.cute as cute
import pytest
import torch
from cutlass import Int32
from cutlass.cute.runtime import from_dlpack
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa.cute.even_shares import shares_of

MOST = 4096  # parts in a test


@cute.jit
def walk(parts: cute.Tensor, items: Int32, count: Int32, workers: Int32):
    """All workers' parts in their order: worker, place, steps, whether its item's first steps are another's."""
    shares = shares_of(items, cute.fast_divmod_create_divisor_v2(count), workers)
    n = Int32(0)
    for worker in cutlass.range(workers):
        place = shares.first(worker)
        while place < shares.begin(worker + 1):
            here = shares.here(worker, place)
            parts[n, 0], parts[n, 1], parts[n, 2], parts[n, 3] = worker, place, here, Int32(0)
            place += here
            if shares.begins_late(worker, place):
                parts[n, 3] = 1
            place = shares.following(worker, place)
            n += 1


@pytest.fixture(scope="module")
def parts_of():
    parts = torch.empty(MOST, 4, dtype=torch.int32)
    compiled = cute.compile(walk, from_dlpack(parts), Int32(1), Int32(1), Int32(1))

    def parts_of(items: int, count: int, workers: int) -> list[list[int]]:
        parts.fill_(-1)
        compiled(from_dlpack(parts), Int32(items), Int32(count), Int32(workers))
        return [part for part in parts.tolist() if part[0] >= 0]

    return parts_of


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_every_step_is_one_workers(parts_of, data):
    workers = data.draw(st.integers(1, 132))
    items, count = data.draw(st.integers(workers, 4 * workers)), data.draw(st.integers(1, 40))
    parts = parts_of(items, count, workers)
    steps = sorted(step for _, place, here, _ in parts for step in range(place, place + here))
    assert steps == list(range(items * count))
    for worker, place, here, late in parts:
        assert place // count == (place + here - 1) // count and late == (place % count != 0)
        # What is cut goes on with the next worker, which begins with it: its first place that is not a turn's.
        if (place + here) % count:
            assert [worker + 1, place + here] in [part[:2] for part in parts]
    amounts = [sum(here for w, _, here, _ in parts if w == worker) for worker in range(workers)]
    assert max(amounts) - min(amounts) <= 1


def test_neighbours_run_at_the_same_time(parts_of):
    parts = parts_of(300, 5, 132)
    assert [place for _, place, _, _ in parts if place < 132 * 5] == [5 * worker for worker in range(132)]
