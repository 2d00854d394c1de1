"""SASS of the hyper-connections: each stream is read once, with wide loads. Divisions and powers are approximations,
which need no function calls."""

from dsa.kernels.elementwise import hyper_connections_sm90 as kernels
from tests.kernels.variants import assert_counts, shipped


@shipped(kernels.compile_hyper_collapse, kernels.compile_hyper_head)
def test_collapse_and_head(sass, compile_function, arguments):
    _, threads, steps = arguments
    # LDG: the vectors of four streams, and mix, base and scale of pre. post and comb need 20 numbers each of mix and
    # base (5 loads each), and two scales.
    post_and_comb = 2 * 5 + 2 if compile_function is kernels.compile_hyper_collapse else 0
    assert_counts(sass, LDG=4 * steps + 3 + post_and_comb, BAR=1, CALL=0)
    assert sass.registers * threads <= 65536 // (2048 // (threads * steps))


@shipped(kernels.compile_hyper_expand)
def test_expand(sass):
    assert_counts(sass, LDG=5 + 1 + 4, STG=4, CALL=0)
    assert sass.registers <= 64
