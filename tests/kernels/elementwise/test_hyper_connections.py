"""SASS of the hyper-connections: each stream is read once, with wide loads. Divisions and powers are approximations,
which need no function calls."""

from dsa.kernels.elementwise import hyper_connections_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped

# {compile function: loads of post and comb}: of each four numbers, one load of mix and one of base, and the scales.
LOADS = {
    kernels.compile_hyper_collapse: 2 * 5 + 2,
    kernels.compile_hyper_collapse_independent: 2 * 1 + 1,
    kernels.compile_hyper_head: 0,
}


@shipped(*LOADS)
def test_collapse_and_head(sass, compile_function, arguments):
    _, threads, steps = arguments
    # LDG: the vectors of four streams, and mix, base and scale of pre.
    assert_counts(sass, LDG=4 * steps + 3 + LOADS[compile_function], BAR=1, CALL=0)
    assert sass.registers * threads <= 65536 // (2048 // (threads * steps))


@shipped(kernels.compile_hyper_expand)
def test_expand(sass, arguments):
    *_, mixed = arguments
    assert_counts(sass, LDG=5 + 1 + 4 * mixed, STG=4, CALL=0)
    assert sass.registers <= 64
