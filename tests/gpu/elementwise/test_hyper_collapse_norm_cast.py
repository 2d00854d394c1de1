"""Collapse, norm and cast in one on the GPU: the bits of the two ops one after the other."""

from functools import partial

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from dsa_layers.layers.hyper_connections import HyperConnection
from dsa_layers.layers.hyper_sublayer import enter
from dsa_layers.layers.moe import SwiGLU
from dsa_layers.layers.norm import RMSNorm
from tests.gpu.op_checks import assert_equal, assert_runs_have_the_same_bits, replays

# The ends of what each tile holds, and what models have.
LENGTHS = [128, 256, 384, 512, 640, 1024, 1152, 1536, 2048, 2176, 3968, 4096, 4224, 6144, 7168, 8192]
OPTIONS = {"iterations": 20, "eps": 1e-6, "hc_eps": 1e-6}


def inputs(tokens, d):
    """Tokens of every size."""
    size = torch.logspace(-3, 3, max(tokens, 1), device="cuda")[:tokens, None, None]
    streams = (torch.randn(tokens, 4, d, device="cuda") * size).bfloat16()
    mix, base = torch.randn(tokens, 24, device="cuda") * size[:, 0], torch.randn(24, device="cuda")
    return streams, mix, base, torch.rand(3, device="cuda") + 0.5, torch.randn(d, device="cuda")


def apart(*given, norm_eps=1e-6, use_ue8m0=True, **options):
    *first, weight = given
    x, *weights = dsa.hyper_collapse(*first, **options)
    return *dsa.rms_norm_cast_to_fp8(x, weight, norm_eps, use_ue8m0), *weights


def check(*given, **options):
    poison_free_memory(mebibytes=64)
    got = dsa.hyper_collapse_norm_cast_to_fp8(*given, **options)
    assert_equal(got, apart(*given, **options))
    assert all(result.is_contiguous() for result in got)


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("d", LENGTHS)
@pytest.mark.parametrize("tokens", [1, 37])
def test_lengths(tokens, d, use_ue8m0):
    check(*inputs(tokens, d), use_ue8m0=use_ue8m0)


@pytest.mark.parametrize("tokens", [0, 1, 2, 8, 132, 1024, 1025, 2047, 2050, 4096, 9001])
@pytest.mark.parametrize("d", [256, 4096, 7168])
def test_tokens(tokens, d):
    """A CTA has one, two, three or four of them; the last one has fewer."""
    check(*inputs(tokens, d))


@pytest.mark.parametrize(
    "options",
    [{"iterations": 1}, {"iterations": 3, "hc_eps": 0.1}, {"eps": 0.5}, {"norm_eps": 0.5, "use_ue8m0": False}],
    ids=str,
)
def test_options(options):
    check(*inputs(50, 512), **options)


def test_streams_of_wider_tensors():
    """What lies between the rows is NaN, and stays."""
    for d in (128, 640, 4096):
        wide = torch.full((30, 6, d + 64), torch.nan, device="cuda").bfloat16()
        streams = wide[:, 1:5, 8 : d + 8]
        streams.normal_()
        check(streams, *inputs(30, d)[1:])
        assert wide.isnan().sum() == 30 * (6 * (d + 64) - 4 * d)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("of", [0, 1], ids=["streams", "mix"])
@pytest.mark.parametrize("tokens", [10, 4099])
def test_bits_of_what_is_not_finite(tokens, of, value):
    given = inputs(tokens, 256)
    given[of][6].view(-1)[3] = value
    check(*given)


def test_zeros():
    streams, *rest = inputs(6, 512)
    check(streams * 0, *rest)
    check(streams * 0, *rest, eps=0.0, norm_eps=0.0)


def test_twenty_runs_are_identical():
    assert_runs_have_the_same_bits(dsa.hyper_collapse_norm_cast_to_fp8, *inputs(1500, 4096))


def test_offsets_beyond_32_bits():
    tokens = 2**31 // (4 * 8192) + 50
    streams = torch.zeros(tokens, 4, 8192, dtype=torch.bfloat16, device="cuda")
    some, mix, *rest = inputs(100, 8192)
    streams[-100:] = some
    all_mix = torch.zeros(tokens, 24, device="cuda")
    all_mix[-100:] = mix
    got = dsa.hyper_collapse_norm_cast_to_fp8(streams, all_mix, *rest)
    assert_equal([x[-100:] for x in got], dsa.hyper_collapse_norm_cast_to_fp8(some, mix, *rest))


@pytest.mark.parametrize("tokens", [1, 33])
def test_graph_of_kernels_that_follow_each_other(tokens):
    """Each waits for the one in front of it: the streams, and the parameters, are new each time."""
    given = inputs(tokens, 4096)

    def run(streams, *rest):
        return [dsa.hyper_collapse_norm_cast_to_fp8(streams * i, *rest) for i in range(1, 9)]

    for held in replays(run, given, partial(inputs, tokens, 4096), times=5):
        for i, got in enumerate(held, 1):
            assert_equal(got, apart(given[0] * i, *given[1:]))


@pytest.mark.parametrize("tokens", [1, 8, 600])
def test_the_layers(tokens):
    hc, norm, layer = HyperConnection(4096, 4).cuda(), RMSNorm(4096).cuda(), SwiGLU(4096, 256, fp8=True).cuda()
    for parameter in (hc.fn, hc.base, norm.weight):
        torch.nn.init.normal_(parameter, std=0.1)
    streams = torch.randn(tokens, 4, 4096, device="cuda").bfloat16()
    with torch.inference_mode():
        y, cast, weights = enter(hc, streams, norm, layer)
        x, *expected = hc.collapse(streams)
        assert_equal((y, *cast, *weights), (norm(x), *layer.gate_proj.cast(norm(x)), *expected))
