"""Every shipped variant of scores over pages and selection in one compiles to sm_90a: FP8 wgmma, TMA, no spills; and
its plan has room for every part of the work."""

import random
from itertools import pairwise

import pytest

from dsa.kernels.indexer import paged_indexer_select_sm90 as kernels
from dsa.kernels.indexer import paged_select_plan as plan
from dsa.kernels.indexer.limits import HEADS, NEXT_N
from dsa.kernels.indexer.score_tile import TILE
from dsa.kernels.indexer.select_limits import ZERO_WORDS
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from tests.kernels.variants import shipped, shipped_variants_of

SMS = 132


@shipped(kernels.compile_paged_indexer_select)
def test_sass(arguments):
    heads, dim, next_n, page_size, half, config = arguments
    sass = disassemble(cubin(kernels.compile_paged_indexer_select, *arguments))
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.instructions["QGMMA"] == dim // 32
    # Queries and every page of a tile by TMA; weights of every query and scales of every page by bulk copies.
    assert sass.instructions["UTMALDG"] == 1 + 64 // page_size
    assert sass.instructions["UBLKCP"] == next_n + 64 // page_size
    # One multiply-add an accumulator, or of half scores for two, and a maximum; and a few of integer divisions.
    columns = heads * next_n
    if half:
        assert sass.instructions["HFMA2"] == sass.instructions["HMNMX2"] == columns // 4
    assert 0 <= sass.instructions["FFMA"] - (0 if half else columns // 2) <= 8
    # Launched behind the kernel before, and waits for it.
    assert sass.instructions["ACQBULK"]
    assert sass.registers * config.threads <= 65536


def test_half_scores_are_shipped_for_more_than_128_columns():
    shapes = {(heads, next_n): False for heads in HEADS for next_n in NEXT_N}
    for _, (heads, _, next_n, _, half, _) in shipped_variants_of(kernels.compile_paged_indexer_select):
        shapes[heads, next_n] |= half
    assert shapes == {(heads, next_n): heads * next_n > 128 for heads, next_n in shapes}


def tiles_of_ctas(lengths, ctas):
    """The tiles of every CTA, as the kernel shares them out."""
    tiles = [-(-n // TILE) for n in lengths]
    total, found = sum(tiles), []
    for own in tiles:
        members = min(1 + (ctas - len(tiles)) * own // max(total, 1), max(own, 1))
        bounds = [own * i // members for i in range(members + 1)]
        found += [end - first for first, end in pairwise(bounds)]
    return found


@pytest.mark.parametrize("next_n", NEXT_N)
@pytest.mark.parametrize("heads", HEADS)
def test_every_part_of_the_work_has_room(heads, next_n):
    rng = random.Random(0)
    room = plan.choose_config(heads, next_n, False).capacity(heads * next_n, next_n, False)
    for most in (1, 64, 65, 5000, 131072, 2**20, room * (SMS - 1)):
        for ctas in (SMS, 114, 78):
            batch = plan.sequences_of_launch(most, room, ctas)
            if ctas == SMS and most <= 131072:
                assert batch >= 7  # a step of few sequences is one launch
            for _ in range(20 if batch else 0):
                lengths = [rng.choice((0, 1, most, rng.randint(0, most))) for _ in range(rng.randint(1, batch))]
                parts = tiles_of_ctas(lengths, ctas)
                assert len(parts) <= ctas and max(parts) * TILE <= room
                parts = tiles_of_ctas([most] * batch, ctas)
                assert len(parts) <= ctas and max(parts) * TILE <= room


def test_a_launch_has_as_many_sequences_as_have_room():
    room = plan.choose_config(64, 1, False).capacity(64, 1, False)
    assert plan.sequences_of_launch(1, room, SMS) == plan.MAX_SEQUENCES
    most = room * (SMS - 1)
    assert plan.sequences_of_launch(most, room, SMS) == 1
    assert plan.sequences_of_launch(most + 1, room, SMS) == 0


def test_a_row_of_the_workspace():
    """Counts of 16-byte vectors, numbers of as many CTAs as there are, and a list as long as one more vector of the
    selection at the end."""
    assert plan.FIRST_BIN[0] % 4 == 0 and all(n % 4 == 0 for n in plan.BINS)
    assert plan.FIRST_ENTRY + plan.ENTRIES == plan.ROW_WORDS and plan.FIRST_CTA == ZERO_WORDS
    assert plan.ENTRIES >= 1024
