"""Expansion and projection in one kernel, with sizes, strides and numbers that the case leaves out, and among other
kernels."""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory
from dsa_layers.layers.hyper_connections import HyperConnection
from dsa_layers.layers.hyper_sublayer import leave
from tests.gpu.op_checks import assert_equal, replays

(CASE,) = cases_of("hyper_expand_mix")


def inputs(tokens, channels=4096, seed=0):
    return [*CASE.arguments("cuda", seed, tokens=tokens, channels=channels).values()]


def apart(y, streams, post, comb, parts):
    new = dsa.hyper_expand(y, streams, post, comb)
    return new, dsa.hyper_mix(new, parts)


@pytest.mark.parametrize(
    ("tokens", "channels", "outputs"),
    [
        *product(range(1, 10), (8, 64, 72, 264, 512, 832, 1024, 1032, 2056, 4096, 5120, 7168, 16384), (24,)),
        *product(range(1, 10), (4096,), (1, 4, 13, 100)),
        *product((17, 64, 65, 300, 2000), (4096,), (24,)),
    ],
)
def test_sizes(tokens, channels, outputs, record_error):
    """Every number of tokens that one kernel takes, and more tokens. Empty slices, parts of a block, one round of
    blocks and several; a last cluster with fewer outputs."""
    poison_free_memory(mebibytes=64)
    record_error(CASE.verify("cuda", tokens=tokens, channels=channels, outputs=outputs))


@pytest.mark.parametrize("tokens", [1, 3, 4])
@pytest.mark.parametrize("channels", [64, 264, 4096])
def test_rows_of_wider_tensors(channels, tokens):
    """NaN between the rows reaches no result and stays."""
    wide = torch.full((tokens, 6, channels + 64), torch.nan, device="cuda").bfloat16()
    streams, y = (x.normal_() for x in (wide[:, 1:5, 8 : channels + 8], wide[:, 5, 8 : channels + 8]))
    given = CASE.arguments("cuda", tokens=tokens, channels=channels)
    CASE.check_call(given | {"y": y, "streams": streams})
    assert wide.isnan().sum() == tokens * (6 * (channels + 64) - 5 * channels)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("of", ["y", "streams", "post", "comb"])
def test_what_is_not_finite_is_where_the_two_ops_have_it(of, value):
    given = CASE.arguments("cuda", tokens=8, channels=256)
    given[of][6].view(-1)[3] = value
    assert_equal(dsa.hyper_expand_mix(**given), apart(**given))


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_thousand_runs_are_identical(tokens):
    """Each may begin before the previous one has ended, and sends to the CTAs of its own cluster alone."""
    given = inputs(tokens)
    expected = apart(*given)
    results = [dsa.hyper_expand_mix(*given) for _ in range(1000)]
    for got in results:
        assert_equal(got, expected)


@pytest.mark.parametrize("tokens", [1, 5])
def test_graph_of_kernels_that_follow_each_other(tokens):
    """Each kernel reads the streams that the previous one wrote; inputs and the matrix are new in every replay."""
    seeds = iter(range(1, 6))

    def renew():
        y, streams, post, comb, parts = inputs(tokens, seed=next(seeds))
        return y, streams, post, comb * 0.25, parts

    def run(y, new, *rest, op=dsa.hyper_expand_mix):
        mixes = []
        for _ in range(12):
            new, mix = op(y, new, *rest)
            mixes.append(mix)
        return new, *mixes

    given = inputs(tokens)
    for held in replays(run, given, renew, times=5):
        assert_equal(held, run(*given, op=apart))


def test_clusters_compete_with_kernels_that_hold_the_gpu():
    """Products on a second stream take SMs. No cluster waits for a CTA that has not started."""
    given, other = inputs(8, 7168), torch.cuda.Stream()
    expected, a = apart(*given), torch.randn(4096, 4096, device="cuda").bfloat16()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        for _ in range(50):
            a @ a
    results = [dsa.hyper_expand_mix(*given) for _ in range(200)]
    torch.cuda.synchronize()
    for got in results:
        assert_equal(got, expected)


@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_the_layers(tokens):
    hc, following = (HyperConnection(4096, 4).cuda() for _ in range(2))
    torch.nn.init.normal_(following.fn, std=0.02)
    y, streams, post, comb, _ = inputs(tokens)
    with torch.inference_mode():
        new = hc.expand(y, streams, post, comb)
        assert_equal(leave(hc, y, streams, (post, comb), following), (new, following.project(new)))
