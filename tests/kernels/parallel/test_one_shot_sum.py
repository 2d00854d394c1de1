"""The sums over GPUs: SASS that sends whole words and waits for them in tight loops, and the sizes of parts."""

import pytest

from dsa.cute.weighted_rows import BATCH
from dsa.kernels.parallel import experts_sum_sm90 as experts
from dsa.kernels.parallel import one_shot_sum_sm90 as kernels
from dsa.kernels.parallel.limits import PART, RANKS
from dsa_layers.parallel.one_shot_sum import MEMORY, most_bytes
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_one_shot_sum)
def test_sass(sass, arguments):
    _, ranks = arguments
    # Loads: the turn number, the first and the next bytes of this rank's part; then 16 bytes at a time from each rank,
    # and a flag that tells whether another thread has given up. Each wait is a first check and a loop. Stores: 16 bytes
    # to each rank; the result; the next turn number by the last CTA; and per rank the mark of a lost rank.
    assert_counts(sass, LDG=3 + 4 * ranks, ATOMG=1, STG=ranks + 1 + 2 + 2 * ranks)
    assert sass.registers <= 64


@shipped(experts.compile_experts_sum)
def test_sass_of_experts(sass, arguments):
    _, ranks, shared = arguments
    # Copies load the rows of this part and of the next part, a batch at a time, after the rows' numbers and weights.
    assert_counts(sass, LDGSTS=2 * BATCH, LDGDEPBAR=2)
    assert sass.instructions["LDG"] >= 1 + 2 * (2 * BATCH + shared) + ranks
    assert sass.registers <= 96 and sass.shared <= BATCH * kernels.THREADS * PART + 2048


@pytest.mark.parametrize(("parts", "ctas"), [(1, 1), (1024, 4), (10**6, 132)])
def test_all_ctas_run_at_once(parts, ctas):
    assert kernels.choose_ctas(parts, 132) == ctas


@pytest.mark.parametrize("ranks", RANKS)
def test_the_largest_parts_fit_the_memory(ranks):
    """The memory has space for two sums from all ranks, in which each part needs twice its bytes."""
    most = most_bytes(ranks)
    assert most % PART == 0 and MEMORY - 4096 < 2 * 2 * ranks * most <= MEMORY
