"""The sums over GPUs (one_shot_sum_sm90.py, experts_sum_sm90.py): counts of loads and stores in the SASS, the number of
CTAs, and the largest parts that fit the receive memory."""

import pytest

from dsa.cute.weighted_rows import BATCH
from dsa.kernels.parallel import experts_sum_sm90 as experts
from dsa.kernels.parallel import one_shot_sum_sm90 as kernels
from dsa.kernels.parallel.limits import PART, RANKS
from dsa.parallel.one_shot_sum import MEMORY, most_bytes
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_one_shot_sum)
def test_sass(sass, arguments):
    _, ranks = arguments
    # LDG: the turn (the number of the sum), this rank's first place, and the next place. Per rank, a packet and the
    # flag turns[2]. Both are loaded twice: in a first check, and in a waiting loop. STG: a packet to each rank, the
    # result, turns[0] and turns[1]. Per rank, turns[2], and `lost` if a thread stops waiting.
    assert_counts(sass, LDG=3 + 4 * ranks, ATOMG=1, STG=ranks + 1 + 2 + 2 * ranks)
    assert sass.registers <= 64


@shipped(experts.compile_experts_sum)
def test_sass_of_experts(sass, arguments):
    _, ranks, shared = arguments
    # The kernel copies a place's rows, BATCH at a time. The code exists twice: for the first place and for later
    # places.
    assert_counts(sass, LDGSTS=2 * BATCH, LDGDEPBAR=2)
    assert sass.instructions["LDG"] >= 1 + 2 * (2 * BATCH + shared) + ranks
    assert sass.registers <= 96 and sass.shared <= BATCH * kernels.THREADS * PART + 2048


@pytest.mark.parametrize(("parts", "ctas"), [(1, 1), (1024, 4), (10**6, 132)])
def test_all_ctas_run_at_once(parts, ctas):
    assert kernels.choose_ctas(parts, 132) == ctas


@pytest.mark.parametrize("ranks", RANKS)
def test_the_largest_parts_fit_the_memory(ranks):
    """The receive memory has two buffers, each with a part from every rank. A part needs twice its bytes, because half
    of each packet is the number of the sum."""
    most = most_bytes(ranks)
    assert most % PART == 0 and MEMORY - 4096 < 2 * 2 * ranks * most <= MEMORY
