"""The bridge of the streams' projection: which kernel it launches, what it refuses, where the formula runs."""

import pytest
import torch

import dsa
from dsa.kernels.elementwise.limits import MAX_MIX_OUTPUTS, MAX_MIX_TOKENS, MAX_MIX_WIDTH
from dsa.ops.elementwise import hyper_mix as op


def arguments(tokens=5, n=4, d=64, count=24):
    return {
        "streams": torch.randn(tokens, n, d).bfloat16(),
        "parts": torch.randn(3, count, n * d).bfloat16(),
    }


@pytest.mark.parametrize(
    ("tokens", "options", "kernel", "rows"),
    [
        (1, {}, "few_tokens", 16),
        (16, {}, "few_tokens", 16),
        (17, {}, "few_tokens", 32),
        (64, {}, "few_tokens", 32),
        (65, {}, "many_tokens", 32),
        (448, {}, "many_tokens", 32),
        (449, {}, "many_tokens", 64),
        (896, {}, "many_tokens", 64),
        (897, {}, "many_tokens", 128),
        (1792, {}, "many_tokens", 128),
        (1793, {}, "persistent", 256),
        (300, {"n": 1}, "many_tokens", 32),
        (300, {"d": 72}, "few_tokens", 32),
        (300, {"count": 4}, "few_tokens", 32),
    ],
)
def test_what_is_launched(named_launches, tokens, options, kernel, rows):
    given = arguments(tokens, **options)
    mix = dsa.hyper_mix(**given)
    (found,) = named_launches
    assert found[:2] == (kernel, (rows,))
    streams, parts, *rest = found[2]
    if kernel == "persistent":
        halves, *rest, ctas = rest
        assert halves.shape == (16, tokens, 24) and halves.dtype == torch.float32 and ctas == 128
    (out,) = rest
    assert out is mix and mix.shape == (tokens, given["parts"].shape[1]) and mix.dtype == torch.float32
    for ours, theirs in ((streams, given["streams"]), (parts, given["parts"])):
        assert ours.data_ptr() == theirs.data_ptr() and ours.numel() == theirs.numel()
    assert streams.dim() == (3 if kernel == "few_tokens" else 2) == parts.dim()


def test_streams_with_gaps(named_launches):
    """Between the tokens, and then between the streams too, which one TMA block could not step over."""
    wide = torch.randn(300, 6, 128).bfloat16()
    for streams in (wide[:, :4], wide[:, :4, :64]):
        dsa.hyper_mix(streams, torch.randn(3, 24, 4 * streams.shape[2]).bfloat16())
    dsa.hyper_mix(wide[:1].expand(300, 6, 128), torch.randn(3, 24, 768).bfloat16())
    assert [name for name, *_ in named_launches] == ["many_tokens", "few_tokens", "few_tokens"]
    assert [given[0].stride() for *_, given in named_launches] == [(768, 1), (768, 128, 1), (0, 128, 1)]


def test_a_single_token_of_odd_strides(named_launches):
    """The stride of a dimension with one element means nothing; a kernel is given one that it takes."""
    wide = torch.zeros(1, 257).bfloat16()
    dsa.hyper_mix(**(arguments(1) | {"streams": wide.as_strided((1, 4, 64), (257, 64, 1))}))
    ((_, _, (streams, *_)),) = named_launches
    assert streams.stride(0) % 8 == 0


def test_nothing_to_do(named_launches):
    assert dsa.hyper_mix(**arguments(0)).shape == (0, 24) and not named_launches


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"d": 60}, {}, "streams: the kernel takes D a multiple of 8, got 60"),
        ({}, {"streams": torch.zeros(5, 4, 128).bfloat16()[..., ::2]}, "streams: the last dimension must be contig"),
        ({}, {"streams": torch.zeros(5, 4, 65).bfloat16()[..., 1:]}, "streams: rows must start at multiples of 16"),
        ({}, {"parts": torch.zeros(3, 256, 24).bfloat16().mT}, "parts: must be contiguous"),
        ({}, {"parts": torch.zeros(3 * 24 * 256 + 1).bfloat16()[1:].view(3, 24, 256)}, "parts: must start at a mult"),
        ({}, {"parts": torch.zeros(3, 24, 256, device="meta").bfloat16()}, "parts: must be on streams's device cpu"),
    ],
)
def test_errors(named_launches, options, changes, message):
    with pytest.raises(ValueError, match=message):
        dsa.hyper_mix(**(arguments(**options) | changes))
    assert not named_launches


@pytest.mark.parametrize(
    ("streams", "parts", "message"),
    [
        ((MAX_MIX_TOKENS + 1, 1, 8), (3, 1, 8), "streams: the kernel takes at most 2147483136 tokens"),
        ((1, 1, MAX_MIX_WIDTH + 8), (3, 1, MAX_MIX_WIDTH + 8), "parts: the kernel takes n D at most 1073741824"),
        ((1, 1, 8), (3, MAX_MIX_OUTPUTS + 1, 8), "and C at most 524280, got shape"),
    ],
)
def test_too_large(streams, parts, message):
    with pytest.raises(ValueError, match=message):
        op._check_limits(torch.empty(streams, device="meta"), torch.empty(parts, device="meta"))
