"""vLLM's `fused_q` with the plugin, compared with its formula in float64."""

import pytest
import torch

from dsa.testing import assert_close
from dsa_engines.vllm import queries
from tests.engines.vllm.stand_in import Original, never

TOKENS, HEADS, NOPE, ROPE = queries.LEAST_TOKENS, 2, 16, 64
INDEX_HEADS, INDEX_DIM, SCALES = 3, 128, (0.5, 0.3)
BF16 = {"abs_tol": 1e-6, "rel_tol": 1 / 256, "cos_tol": 4e-6}


def rotated(x, cos, sin, interleaved):
    """Return x [T, heads, R] in float64, with its pairs of channels rotated."""
    x = x.double()
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    cos, sin = cos.double()[:, None], sin.double()[:, None]
    pair = a * cos - b * sin, a * sin + b * cos
    return torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)


def arguments(tokens=TOKENS):
    """Return the arguments by position. `positions` are any rows of the caches."""
    angles = torch.rand(2, 100, ROPE // 2) * 6
    caches = torch.cat([angles.cos(), angles.sin()], dim=-1)
    q = torch.randn(tokens, HEADS, NOPE + ROPE).bfloat16()
    index_q = torch.randn(tokens, INDEX_HEADS, INDEX_DIM).bfloat16()
    weights = torch.randn(tokens, INDEX_DIM + INDEX_HEADS).bfloat16()[:, INDEX_DIM:]  # a slice, as vLLM's are
    positions = torch.randint(0, 100, (tokens,))
    return positions, q[..., NOPE:], caches[0], index_q, caches[1], q[..., :NOPE], torch.ones(1), weights, *SCALES


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_with_an_indexer(interleaved):
    given = arguments()
    positions, q_pe, cache, index_q, index_cache, *_, weights, _, _ = given
    expected = rotated(q_pe, *cache[positions].chunk(2, -1), interleaved=True)
    head = rotated(index_q[..., :ROPE], *index_cache[positions].chunk(2, -1), interleaved=interleaved)
    expected_index = torch.cat([head, index_q[..., ROPE:].double()], -1)
    q, scaled, out = queries.fused_q(never)(*given, index_rope_interleave=interleaved, quantize_mqa=False)
    assert out.dtype == torch.bfloat16
    assert_close("queries", out, expected, **BF16)
    assert q.dtype == torch.float8_e4m3fn and scaled.dtype == torch.float32 and scaled.shape == weights.shape
    scale = scaled.double() / (weights.double() * SCALES[0] * SCALES[1])
    # A power of two, at most twice what the largest channel needs. Three bits of mantissa round by at most 1 / 16.
    assert_close("scales", scale.log2(), scale.log2().round(), abs_tol=1e-5, rel_tol=0)
    needed = expected_index.abs().amax(-1) / 448
    assert ((scale > 0.99 * needed) & (scale < 2.01 * needed)).all()
    error = (q.double() * scale[..., None] - expected_index).abs()
    assert (error <= 0.07 * expected_index.abs() + scale[..., None] * 2**-9).all()


def test_queries_without_an_indexer():
    positions, q_pe, cache, _, _, nope, q_scale, _, _, _ = arguments()
    given = positions, q_pe, cache, None, None, nope, q_scale, None, 0.0, 0.0
    before = q_pe.clone()
    q, weights, out = queries.fused_q(never)(*given, has_indexer=False, quantize_mqa=False)
    assert q is None and weights is None and torch.equal(q_pe, before)
    expected = rotated(q_pe, *cache[positions].chunk(2, -1), interleaved=True)
    assert_close("queries", out, expected, **BF16)


@pytest.mark.parametrize(("tokens", "quantize"), [(TOKENS - 1, False), (TOKENS, True)])
def test_few_tokens_and_fp8_queries_are_left_to_the_engine(tokens, quantize):
    given, original = arguments(tokens), Original()
    options = {"has_indexer": True, "index_rope_interleave": True, "quantize_mqa": quantize}
    assert queries.fused_q(original)(*given, **options) == "vLLM's own"
    original.assert_called_once(given, options)
