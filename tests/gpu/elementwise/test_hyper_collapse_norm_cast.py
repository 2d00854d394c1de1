"""Collapse, norm and cast in one kernel: every tile, options, strides, and numbers that are not finite."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa_layers.layers.hyper_connections import HyperConnection
from dsa_layers.layers.hyper_sublayer import enter
from dsa_layers.layers.moe import SwiGLU
from dsa_layers.layers.norm import RMSNorm
from tests.gpu.case_checks import by_sizes, check_far_rows, check_layouts, grid, verify
from tests.gpu.op_checks import assert_equal, replays

(CASE,) = cases_of("hyper_collapse_norm_cast")
# The longest rows of each tile, and the lengths of models.
LENGTHS = [128, 256, 384, 512, 640, 1024, 1152, 1536, 2048, 2176, 3968, 4096, 4224, 6144, 7168, 8192]
# A CTA has one, two, three or four tokens; the last CTA has fewer.
TOKENS = [2, 8, 132, 1024, 1025, 2047, 2050, 4096, 9001]
OPTIONS = [{"iterations": 1}, {"iterations": 3, "hc_eps": 0.1}, {"eps": 0.5}, {"norm_eps": 0.5, "use_ue8m0": False}]


@by_sizes(
    grid(tokens=(1, 37), channels=LENGTHS, use_ue8m0=(True, False)),
    grid(tokens=TOKENS, channels=(256, 4096, 7168)),
    [{"tokens": 50, "channels": 512, **options} for options in OPTIONS],
)
def test_every_size_and_option_is_right(sizes, record_error):
    verify(CASE, sizes, record_error)


@pytest.mark.parametrize("channels", [128, 640, 4096])
def test_layouts_change_no_bit(channels):
    check_layouts(CASE, ("streams",), tokens=30, channels=channels)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("of", ["streams", "mix"])
@pytest.mark.parametrize("tokens", [10, 4099])
def test_what_is_not_finite_is_where_the_two_ops_have_it(tokens, of, value):
    given = CASE.arguments("cuda", tokens=tokens, channels=256)
    given[of][6].view(-1)[3] = value
    CASE.check_call(given)


def test_zeros_are_right():
    given = CASE.arguments("cuda", tokens=6, channels=512)
    given["streams"].zero_()
    CASE.check_call(given)
    CASE.check_call(given | {"eps": 0.0, "norm_eps": 0.0})


def test_offsets_beyond_32_bits():
    given = CASE.arguments("cuda", tokens=100, channels=8192)
    check_far_rows(CASE, given, ("streams", "mix"), 2**31 // (4 * 8192) + 50)


@pytest.mark.parametrize("tokens", [1, 33])
def test_each_kernel_of_a_graph_waits_for_the_previous_one(tokens):
    """The streams and the parameters are new in every replay."""
    names, seeds = ("streams", "mix", "base", "scale", "weight"), iter(range(1, 6))
    given = CASE.arguments("cuda", tokens=tokens, channels=4096)

    def renew():
        fresh = CASE.arguments("cuda", next(seeds), tokens=tokens, channels=4096)
        return [fresh[name] for name in names]

    def run(streams, *rest):
        return [dsa.hyper_collapse_norm_cast_to_fp8(streams * i, *rest) for i in range(1, 9)]

    for found in replays(run, [given[name] for name in names], renew, times=5):
        for i, got in enumerate(found, 1):
            CASE.check(given | {"streams": given["streams"] * i, "iterations": 20}, got)


@pytest.mark.parametrize("tokens", [1, 8, 600])
def test_the_fused_layer_has_the_bits_of_the_single_layers(tokens):
    hc, norm, layer = HyperConnection(4096, 4).cuda(), RMSNorm(4096).cuda(), SwiGLU(4096, 256, fp8=True).cuda()
    for parameter in (hc.fn, hc.base, norm.weight):
        torch.nn.init.normal_(parameter, std=0.1)
    streams = torch.randn(tokens, 4, 4096, device="cuda").bfloat16()
    with torch.inference_mode():
        y, cast, weights = enter(hc, streams, norm, layer)
        x, *expected = hc.collapse(streams)
        assert_equal((y, *cast, *weights), (norm(x), *layer.gate_proj.cast(norm(x)), *expected))
