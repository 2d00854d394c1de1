"""Which kernel `hyper_mix` launches."""

import pytest
import torch

import dsa
from dsa.cases import cases_of

(CASE,) = cases_of("hyper_mix")


@pytest.mark.parametrize(
    ("tokens", "options", "kernel", "rows"),
    [
        (1, {}, "hyper_mix_few_tokens", 16),
        (16, {}, "hyper_mix_few_tokens", 16),
        (17, {}, "hyper_mix_few_tokens", 32),
        (64, {}, "hyper_mix_few_tokens", 32),
        (65, {}, "hyper_mix", 32),
        (448, {}, "hyper_mix", 32),
        (449, {}, "hyper_mix", 64),
        (896, {}, "hyper_mix", 64),
        (897, {}, "hyper_mix", 128),
        (1792, {}, "hyper_mix", 128),
        (1793, {}, "hyper_mix_persistent", 256),
        (300, {"n": 1}, "hyper_mix", 32),
        (300, {"channels": 72}, "hyper_mix_few_tokens", 32),
        (300, {"outputs": 4}, "hyper_mix_few_tokens", 32),
    ],
)
def test_tokens_choose_the_kernel(named_launches, tokens, options, kernel, rows):
    """hyper_mix_few_tokens gets a token's streams and channels as two dimensions. The other kernels get them as one."""
    CASE.run(CASE.arguments(**{"tokens": tokens, "channels": 64} | options))
    ((name, variant, (streams, parts, *_)),) = named_launches
    assert (name, variant) == (kernel, (rows,))
    assert streams.dim() == (3 if kernel == "hyper_mix_few_tokens" else 2) == parts.dim()


def test_streams_with_gaps(named_launches):
    """The TMA kernel accepts gaps between tokens. It accepts neither gaps between streams (the second tensor) nor a
    token stride of 0 (the third)."""
    wide = torch.randn(300, 6, 128).bfloat16()
    for streams in (wide[:, :4], wide[:, :4, :64]):
        dsa.hyper_mix(streams, torch.randn(3, 24, 4 * streams.shape[2]).bfloat16())
    dsa.hyper_mix(wide[:1].expand(300, 6, 128), torch.randn(3, 24, 768).bfloat16())
    assert [name for name, *_ in named_launches] == ["hyper_mix", "hyper_mix_few_tokens", "hyper_mix_few_tokens"]
    assert [given[0].stride() for *_, given in named_launches] == [(768, 1), (768, 128, 1), (0, 128, 1)]
