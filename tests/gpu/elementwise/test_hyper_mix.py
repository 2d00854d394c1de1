"""The streams' projection on the GPU: against float64, and bit for bit whatever else is in the batch."""

from functools import partial

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from dsa_layers.layers.bf16_parts import BF16Parts
from tests.gpu.op_checks import replays


def inputs(tokens, n, d, count):
    weight = torch.randn(count, n * d, device="cuda") * 0.02
    return torch.randn(tokens, n, d, device="cuda").bfloat16(), BF16Parts().of(weight)


def check(mix, streams, parts):
    """Largest error, in parts of the sum of the products' magnitudes."""
    v, weight = streams.flatten(1).double(), parts.double().sum(0)
    error = (mix.double() - v @ weight.T).abs() / (v.abs() @ weight.abs().T)
    assert mix.dtype == torch.float32 and (error < 4e-6).all()  # a NaN is not
    return error.max().item() if mix.numel() else 0.0


@pytest.mark.parametrize(
    ("n", "d", "count"),
    [(4, 4096, 24), (4, 7168, 24), (4, 4096, 4), (4, 8, 24), (4, 264, 24), (1, 64, 24), (3, 72, 13)],
)
@pytest.mark.parametrize("tokens", [0, 1, 7, 16, 17, 128, 129, 400, 801, 1025, 2049, 4100])
def test_against_float64(tokens, n, d, count, record_error):
    streams, parts = inputs(tokens, n, d, count)
    poison_free_memory(mebibytes=64)
    record_error(check(dsa.hyper_mix(streams, parts), streams, parts))


@pytest.mark.parametrize(("d", "count"), [(256, 24), (832, 24), (4096, 24), (7168, 24), (264, 24), (4096, 4)])
def test_bits_whatever_the_other_tokens(d, count):
    """Both kernels, and every tile of theirs."""
    streams, parts = inputs(4100, 4, d, count)
    whole = dsa.hyper_mix(streams, parts)
    for first, tokens in ((0, 4100), (0, 1), (4001, 7), (100, 17), (99, 256), (5, 500), (9, 1500), (77, 2049)):
        part = slice(first, first + tokens)
        assert torch.equal(dsa.hyper_mix(streams[part], parts), whole[part])


@pytest.mark.parametrize("tokens", [9, 300])
@pytest.mark.parametrize(("low", "high"), [(8, 264), (0, 320)])
def test_streams_with_gaps(tokens, low, high):
    """What lies between the rows is NaN, and stays."""
    wide = torch.full((tokens, 6, 320), torch.nan, device="cuda").bfloat16()
    streams, (_, parts) = wide[:, 1:5, low:high].normal_(), inputs(1, 4, high - low, 24)
    mix = dsa.hyper_mix(streams, parts)
    check(mix, streams, parts)
    assert torch.equal(mix, dsa.hyper_mix(streams.contiguous(), parts))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("tokens", [10, 300, 700, 1300, 4100])
def test_what_is_not_finite_stays_in_its_token(tokens, value):
    streams, parts = inputs(tokens, 4, 256, 24)
    clean = dsa.hyper_mix(streams, parts)
    streams[6, 2, 17] = value
    mix = dsa.hyper_mix(streams, parts)
    others = torch.arange(tokens, device="cuda") != 6
    assert torch.equal(mix[others], clean[others]) and not mix[6].isfinite().any()


def test_graph_replay_with_new_numbers():
    given = inputs(3, 4, 4096, 24)
    for mix in replays(dsa.hyper_mix, given, partial(inputs, 3, 4, 4096, 24)):
        assert torch.equal(mix, dsa.hyper_mix(*given))
