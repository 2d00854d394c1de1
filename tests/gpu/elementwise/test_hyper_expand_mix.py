"""hyper_expand_mix (expansion and projection in one kernel) on the GPU: every size, strides, non-finite numbers, and
the bits of the two separate ops."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from tests.gpu.case_checks import by_sizes, check_layouts, grid, verify
from tests.gpu.op_checks import assert_equal, replays

(CASE,) = cases_of("hyper_expand_mix")


def inputs(tokens, channels=4096, seed=0, mixed=True):
    return [*CASE.arguments("cuda", seed, tokens=tokens, channels=channels, mixed=mixed).values()]


def two_ops(y, streams, post, comb, parts):
    new = dsa.hyper_expand(y, streams, post, comb)
    return new, dsa.hyper_mix(new, parts)


@by_sizes(
    # Some slices (see hyper_mix_few_tokens_sm90.py) are empty, have a partial block of 64 channels, or have one or
    # several blocks.
    grid(tokens=range(1, 10), channels=[8, 64, 72, 264, 512, 832, 1024, 1032, 2056, 4096, 5120, 7168, 16384]),
    grid(tokens=range(1, 10), channels=(4096,), outputs=(1, 4, 13, 100)),
    grid(tokens=(17, 64, 65, 300, 2000), channels=(4096,)),
)
def test_every_size_is_right(sizes, record_error):
    """The fused kernel runs for up to 4 tokens. With an odd number of outputs, the last cluster computes one output
    instead of two."""
    for mixed in (True, False):
        verify(CASE, sizes | {"mixed": mixed}, record_error)


@pytest.mark.parametrize("tokens", [1, 3, 4])
@pytest.mark.parametrize("channels", [64, 264, 4096])
def test_layouts_change_no_bit(channels, tokens):
    check_layouts(CASE, ("y", "streams"), tokens=tokens, channels=channels)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("of", ["y", "streams", "post", "comb"])
def test_what_is_not_finite_is_where_the_two_ops_have_it(of, value):
    given = CASE.arguments("cuda", tokens=8, channels=256)
    given[of][6].view(-1)[3] = value
    for own in (given, given | {"comb": None}):
        assert_equal(dsa.hyper_expand_mix(**own), two_ops(**own))


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("tokens, channels, busy", [(1, 4096, False), (4, 4096, False), (4, 7168, True)])
def test_a_thousand_runs_have_the_same_bits(tokens, channels, busy, mixed):
    """A kernel can begin before the previous kernel ends, and CTAs of a cluster send data to each other. If `busy`,
    matrix products on a second stream occupy SMs, so that some clusters start late."""
    given, a = inputs(tokens, channels, mixed=mixed), torch.randn(4096, 4096, device="cuda").bfloat16()
    expected = two_ops(*given)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(50 if busy else 0):
            a @ a
    results = [dsa.hyper_expand_mix(*given) for _ in range(200 if busy else 1000)]
    torch.cuda.synchronize()
    for got in results:
        assert_equal(got, expected)


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("tokens", [1, 5])
def test_each_kernel_of_a_graph_reads_the_streams_of_the_previous_one(tokens, mixed):
    seeds = iter(range(1, 6))

    def renew():
        y, streams, post, comb, parts = inputs(tokens, seed=next(seeds), mixed=mixed)
        return y, streams, post, comb * 0.25 if mixed else None, parts

    def run(y, new, *rest, op=dsa.hyper_expand_mix):
        mixes = []
        for _ in range(12):
            new, mix = op(y, new, *rest)
            mixes.append(mix)
        return new, *mixes

    given = inputs(tokens, mixed=mixed)
    for found in replays(run, given, renew, times=5):
        assert_equal(found, run(*given, op=two_ops))
