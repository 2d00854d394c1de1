"""The shipped variants of the sum over GPUs compile to sm_90a: whole words on their way, waited for in tight loops."""

import pytest

from dsa.kernels.parallel import experts_sum_sm90 as experts
from dsa.kernels.parallel import one_shot_sum_sm90 as kernels
from dsa.kernels.parallel.limits import PART, RANKS
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble
from dsa_layers.parallel.one_shot_sum import MEMORY, most_bytes
from tests.kernels.variants import shipped


@shipped(kernels.compile_one_shot_sum)
def test_sass(compile_function, arguments):
    sass = disassemble(cubin(compile_function, *arguments))
    _, ranks = arguments
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 64
    # The turn, the own part's first bytes and its next; then of each rank 16 bytes at once, and whether another thread
    # has stopped waiting: a first look, and a loop that the part leaves as it comes.
    assert sass.instructions["LDG"] == 3 + 4 * ranks and sass.instructions["ATOMG"] == 1
    # 16 bytes to each rank; the result, and what the last CTA says of the next turn; of each rank that it is lost.
    assert sass.instructions["STG"] == ranks + 1 + 2 + 2 * ranks


@shipped(experts.compile_experts_sum)
def test_sass_of_experts(compile_function, arguments):
    sass = disassemble(cubin(compile_function, *arguments))
    _, ranks, shared = arguments
    assert sass.stack == 0 and not sass.instructions["STL"] and not sass.instructions["LDL"]
    assert sass.registers <= 96 and sass.shared <= experts.BATCH * kernels.THREADS * PART + 2048
    # Of the first place and of the next, rows by copies, a batch at once behind the numbers and weights.
    assert sass.instructions["LDGSTS"] == 2 * experts.BATCH and sass.instructions["LDGDEPBAR"] == 2
    assert sass.instructions["LDG"] >= 1 + 2 * (2 * experts.BATCH + shared) + ranks


def test_all_ctas_run_at_once():
    assert kernels.choose_ctas(1, 132) == 1 and kernels.choose_ctas(1024, 132) == 4
    assert kernels.choose_ctas(10**6, 132) == 132


@pytest.mark.parametrize("ranks", RANKS)
def test_the_largest_parts_fit_the_memory(ranks):
    """Of two sums and all ranks, each part in twice its bytes."""
    most = most_bytes(ranks)
    assert most % PART == 0 and MEMORY - 4096 < 2 * 2 * ranks * most <= MEMORY
