"""Expansion and projection in one on the GPU: the bits of the two ops one after the other."""

from itertools import product

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from dsa_layers.layers.bf16_parts import BF16Parts
from dsa_layers.layers.hyper_connections import HyperConnection
from dsa_layers.layers.hyper_sublayer import leave
from tests.gpu.op_checks import assert_equal, replays


def inputs(tokens, d, count=24):
    y, streams = torch.randn(tokens, d, device="cuda").bfloat16(), torch.randn(tokens, 4, d, device="cuda").bfloat16()
    post, comb = torch.rand(tokens, 4, device="cuda") * 2, torch.rand(tokens, 4, 4, device="cuda")
    return y, streams, post, comb, BF16Parts().of(torch.randn(count, 4 * d, device="cuda") * 0.02)


def apart(*given):
    *rest, parts = given
    new = dsa.hyper_expand(*rest)
    return new, dsa.hyper_mix(new, parts)


def check(*given):
    poison_free_memory(mebibytes=64)
    got = dsa.hyper_expand_mix(*given)
    assert_equal(got, apart(*given))
    assert all(result.is_contiguous() for result in got)


@pytest.mark.parametrize(
    ("tokens", "d", "count"),
    [
        *product(range(1, 10), (8, 64, 72, 264, 512, 832, 1024, 1032, 2056, 4096, 5120, 7168, 16384), (24,)),
        *product(range(1, 10), (4096,), (1, 4, 13, 100)),
        *product((0, 17, 64, 65, 300, 2000), (4096,), (24,)),
    ],
)
def test_bits_of_the_two_ops(tokens, d, count):
    """All numbers of tokens that one kernel takes, and more. Slices that are empty, parts of a block, one round of
    blocks and several; outputs that the last cluster lacks."""
    check(*inputs(tokens, d, count))


def test_against_float64():
    y, streams, post, comb, parts = inputs(8, 4096)
    new, mix = dsa.hyper_expand_mix(y, streams, post, comb, parts)
    exact = post.double()[..., None] * y.double()[:, None] + comb.double().mT @ streams.double()
    torch.testing.assert_close(new.double(), exact, rtol=2**-8, atol=1e-6)
    v, weight = new.flatten(1).double(), parts.double().sum(0)
    error = (mix.double() - v @ weight.T).abs() / (v.abs() @ weight.abs().T)
    assert (error < 4e-6).all()


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_rows_of_wider_tensors(tokens):
    """What lies between the rows is NaN, and stays."""
    for d in (64, 264, 4096):
        wide = torch.full((tokens, 6, d + 64), torch.nan, device="cuda").bfloat16()
        streams, y = wide[:, 1:5, 8 : d + 8], wide[:, 5, 8 : d + 8]
        streams.normal_()
        y.normal_()
        check(y, streams, *inputs(tokens, d)[2:])
        assert wide.isnan().sum() == tokens * (6 * (d + 64) - 5 * d)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("of", range(4), ids=["y", "streams", "post", "comb"])
def test_bits_of_what_is_not_finite(of, value):
    given = inputs(8, 256)
    given[of][6].view(-1)[3] = value
    check(*given)


@pytest.mark.parametrize("tokens", [1, 8])
def test_a_thousand_runs_are_identical(tokens):
    """Of which each may begin before the one in front has ended, and sends to CTAs of its own cluster alone."""
    given = inputs(tokens, 4096)
    expected = apart(*given)
    results = [dsa.hyper_expand_mix(*given) for _ in range(1000)]
    for got in results:
        assert_equal(got, expected)


@pytest.mark.parametrize("tokens", [1, 5])
def test_graph_of_kernels_that_follow_each_other(tokens):
    """Each reads the streams that the one in front made; inputs and the matrix are new each time."""

    def renew():
        y, streams, post, comb, parts = inputs(tokens, 4096)
        return y, streams, post, comb * 0.25, parts

    def run(y, new, *rest, op=dsa.hyper_expand_mix):
        mixes = []
        for _ in range(12):
            new, mix = op(y, new, *rest)
            mixes.append(mix)
        return new, *mixes

    given = renew()
    for held in replays(run, given, renew, times=5):
        assert_equal(held, run(*given, op=apart))


def test_beside_kernels_that_hold_the_gpu():
    """Clusters of a second stream, for whose multiprocessors both compete: nobody waits for who is not there."""
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
    y, streams, post, comb, _ = inputs(tokens, 4096)
    with torch.inference_mode():
        new = hc.expand(y, streams, post, comb)
        assert_equal(leave(hc, y, streams, (post, comb), following), (new, following.project(new)))
