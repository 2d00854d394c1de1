"""The streams' projection with sizes, strides and numbers that its case leaves out: the same bits in every batch."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory

(CASE,) = cases_of("hyper_mix")


def inputs(tokens, channels, outputs=24):
    given = CASE.arguments("cuda", tokens=tokens, channels=channels, outputs=outputs)
    return given["streams"], given["parts"]


@pytest.mark.parametrize(
    ("n", "channels", "outputs"),
    [(4, 4096, 24), (4, 7168, 24), (4, 4096, 4), (4, 8, 24), (4, 264, 24), (1, 64, 24), (3, 72, 13)],
)
@pytest.mark.parametrize("tokens", [1, 7, 16, 17, 128, 129, 400, 801, 1025, 2049, 4100])
def test_sizes(tokens, n, channels, outputs, record_error):
    poison_free_memory(mebibytes=64)
    record_error(CASE.verify("cuda", tokens=tokens, n=n, channels=channels, outputs=outputs))


@pytest.mark.parametrize(("channels", "outputs"), [(256, 24), (832, 24), (4096, 24), (7168, 24), (264, 24), (4096, 4)])
def test_a_token_does_not_depend_on_the_others(channels, outputs):
    """With all kernels, and every tile of theirs."""
    streams, parts = inputs(4100, channels, outputs)
    whole = dsa.hyper_mix(streams, parts)
    for first, tokens in ((0, 4100), (0, 1), (4001, 7), (100, 17), (99, 256), (5, 500), (9, 1500), (77, 2049)):
        part = slice(first, first + tokens)
        assert torch.equal(dsa.hyper_mix(streams[part], parts), whole[part])


@pytest.mark.parametrize("tokens", [9, 300])
@pytest.mark.parametrize(("low", "high"), [(8, 264), (0, 320)])
def test_streams_with_gaps(tokens, low, high):
    """NaN between the rows reaches no result."""
    wide = torch.full((tokens, 6, 320), torch.nan, device="cuda").bfloat16()
    streams, (_, parts) = wide[:, 1:5, low:high].normal_(), inputs(1, high - low)
    CASE.check_call({"streams": streams, "parts": parts})
    assert torch.equal(dsa.hyper_mix(streams, parts), dsa.hyper_mix(streams.contiguous(), parts))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("tokens", [10, 300, 700, 1300, 4100])
def test_what_is_not_finite_stays_in_its_token(tokens, value):
    streams, parts = inputs(tokens, 256)
    clean = dsa.hyper_mix(streams, parts)
    streams[6, 2, 17] = value
    mix = dsa.hyper_mix(streams, parts)
    others = torch.arange(tokens, device="cuda") != 6
    assert torch.equal(mix[others], clean[others]) and not mix[6].isfinite().any()
