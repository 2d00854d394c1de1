"""Collapse, norm and cast in one kernel, with sizes, options, strides and numbers that the case leaves out."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory
from dsa_layers.layers.hyper_connections import HyperConnection
from dsa_layers.layers.hyper_sublayer import enter
from dsa_layers.layers.moe import SwiGLU
from dsa_layers.layers.norm import RMSNorm
from tests.gpu.op_checks import assert_equal, replays

(CASE,) = cases_of("hyper_collapse_norm_cast")
# The longest rows of each tile, and the lengths of models.
LENGTHS = [128, 256, 384, 512, 640, 1024, 1152, 1536, 2048, 2176, 3968, 4096, 4224, 6144, 7168, 8192]


def verify(record_error, **sizes):
    poison_free_memory(mebibytes=64)
    record_error(CASE.verify("cuda", **sizes))


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("channels", LENGTHS)
@pytest.mark.parametrize("tokens", [1, 37])
def test_lengths(tokens, channels, use_ue8m0, record_error):
    verify(record_error, tokens=tokens, channels=channels, use_ue8m0=use_ue8m0)


@pytest.mark.parametrize("tokens", [2, 8, 132, 1024, 1025, 2047, 2050, 4096, 9001])
@pytest.mark.parametrize("channels", [256, 4096, 7168])
def test_tokens(tokens, channels, record_error):
    """A CTA has one, two, three or four of them; the last CTA has fewer."""
    verify(record_error, tokens=tokens, channels=channels)


@pytest.mark.parametrize(
    "options",
    [{"iterations": 1}, {"iterations": 3, "hc_eps": 0.1}, {"eps": 0.5}, {"norm_eps": 0.5, "use_ue8m0": False}],
    ids=str,
)
def test_options(options, record_error):
    verify(record_error, tokens=50, channels=512, **options)


@pytest.mark.parametrize("channels", [128, 640, 4096])
def test_streams_of_wider_tensors(channels):
    """NaN between the rows reaches no result and stays."""
    wide = torch.full((30, 6, channels + 64), torch.nan, device="cuda").bfloat16()
    streams = wide[:, 1:5, 8 : channels + 8].normal_()
    CASE.check_call(CASE.arguments("cuda", tokens=30, channels=channels) | {"streams": streams})
    assert wide.isnan().sum() == 30 * (6 * (channels + 64) - 4 * channels)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("of", ["streams", "mix"])
@pytest.mark.parametrize("tokens", [10, 4099])
def test_what_is_not_finite_is_where_the_two_ops_have_it(tokens, of, value):
    given = CASE.arguments("cuda", tokens=tokens, channels=256)
    given[of][6].view(-1)[3] = value
    CASE.check_call(given)


def test_zeros():
    given = CASE.arguments("cuda", tokens=6, channels=512)
    given["streams"].zero_()
    CASE.check_call(given)
    CASE.check_call(given | {"eps": 0.0, "norm_eps": 0.0})


def test_offsets_beyond_32_bits():
    tokens = 2**31 // (4 * 8192) + 50
    given = CASE.arguments("cuda", tokens=100, channels=8192)
    streams, mix = torch.zeros(tokens, 4, 8192, dtype=torch.bfloat16, device="cuda"), given["mix"].new_zeros(tokens, 24)
    streams[-100:], mix[-100:] = given["streams"], given["mix"]
    got = dsa.hyper_collapse_norm_cast_to_fp8(**given | {"streams": streams, "mix": mix})
    assert_equal([x[-100:] for x in got], dsa.hyper_collapse_norm_cast_to_fp8(**given))


@pytest.mark.parametrize("tokens", [1, 33])
def test_graph_of_kernels_that_follow_each_other(tokens):
    """Each kernel waits for the previous one; the streams and the parameters are new in every replay."""
    given, seeds = CASE.arguments("cuda", tokens=tokens, channels=4096), iter(range(1, 6))
    tensors = ("streams", "mix", "base", "scale", "weight")

    def new():
        fresh = CASE.arguments("cuda", next(seeds), tokens=tokens, channels=4096)
        return [fresh[name] for name in tensors]

    def run(streams, *rest):
        return [dsa.hyper_collapse_norm_cast_to_fp8(streams * i, *rest) for i in range(1, 9)]

    for held in replays(run, [given[name] for name in tensors], new, times=5):
        for i, got in enumerate(held, 1):
            CASE.check(given | {"streams": given["streams"] * i, "iterations": 20}, got)


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
