"""W_UV applied to attended latents and cast, on the GPU: the bytes of bmm with dequantised weights and the cast."""

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory

# heads, value channels, rows of a head: V3.2's, GLM-5's, a GPU's share of each, heads at any multiple of 32 rows
HEADS = [(128, 128, 256), (64, 256, 448), (16, 128, 256), (8, 256, 448), (5, 128, 160), (3, 256, 288)]


def operands(tokens, heads, v_dim, rows):
    """Weights whose blocks differ in size; every scale has all of its bits; heads of a token differ in size, too."""
    weight = torch.randn(heads * rows, 512, device="cuda") * 512**-0.5
    weight *= torch.logspace(-2, 1, heads * rows, device="cuda")[:, None]
    attended = torch.randn(tokens, heads, 512, device="cuda") * torch.logspace(-4, 3, heads, device="cuda")[:, None]
    return attended.bfloat16(), dsa.per_block_cast_to_fp8(weight, use_ue8m0=False)


def up_projection(kv_b, heads, v_dim):
    return dsa.dequantize_per_block(*kv_b, torch.bfloat16).unflatten(0, (heads, -1))[:, -v_dim:]


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 17, 32, 100])
@pytest.mark.parametrize("heads, v_dim, rows", HEADS)
def test_against_float64(tokens, heads, v_dim, rows, use_ue8m0, record_error):
    attended, kv_b = operands(tokens, heads, v_dim, rows)
    poison_free_memory(mebibytes=64)
    q, scale = dsa.mla_values_cast_to_fp8(attended, kv_b, v_dim, use_ue8m0)
    w = up_projection(kv_b, heads, v_dim).double()
    expected = torch.einsum("thc,hvc->thv", attended.double(), w)
    size = torch.einsum("thc,hvc->thv", attended.double().abs(), w.abs())
    expected, size = (x.reshape(tokens, -1, 128) for x in (expected, size))
    # y is rounded to bf16; a sum of fp32 is off by far less.
    bound = expected.abs() * 2**-8 + size * 2**-18
    amax, off = expected.abs().amax(-1), bound.amax(-1)
    low, high = ((amax + sign * off).clamp_min(1e-4) / 448 for sign in (-1, 1))
    if use_ue8m0:
        assert (scale.frexp().mantissa == 0.5).all()
        low, high = (2.0 ** x.log2().ceil() for x in (low, high))
    assert ((scale >= low * (1 - 1e-6)) & (scale <= high * (1 + 1e-6))).all()
    step = scale.double()[..., None]
    error = (q.double().view(expected.shape) * step - expected).abs()
    record_error((error / size).max())
    # Of e4m3: half of the last place of three bits, or half of the smallest number.
    assert (error <= bound * 1.07 + expected.abs() / 16 + step * 2**-10).all()


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("heads, v_dim, rows", HEADS[:2])
def test_within_summation_order_of_bmm(heads, v_dim, rows, use_ue8m0):
    attended, kv_b = operands(16, heads, v_dim, rows)
    q, scale = dsa.mla_values_cast_to_fp8(attended, kv_b, v_dim, use_ue8m0)
    y = torch.bmm(attended.transpose(0, 1), up_projection(kv_b, heads, v_dim).mT).transpose(0, 1)
    expected, scales = dsa.per_token_cast_to_fp8(y.flatten(1), use_ue8m0)
    same = scale == scales
    assert same.float().mean() > 0.9
    bytes_differ = q.view(torch.uint8).view(*scale.shape, 128) != expected.view(torch.uint8).view(*scale.shape, 128)
    assert bytes_differ[same].float().mean() < 0.02


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("value", [2.0**-9, 0.0, 448.0, -448.0])
def test_bytes_of_single_weights(value, use_ue8m0):
    """One latent channel of a token is 1: y is a column of weights, to the bit, and so are the bytes of its cast."""
    _, (weight, scale) = operands(1, 4, 128, 256)
    weight.view(-1)[::7] = torch.tensor(value, device="cuda").to(weight.dtype)
    w = up_projection((weight, scale), 4, 128)
    for first in range(0, 512, 64):
        attended = torch.zeros(64, 4, 512, device="cuda", dtype=torch.bfloat16)
        attended[torch.arange(64), :, torch.arange(first, first + 64)] = 1
        got = dsa.mla_values_cast_to_fp8(attended, (weight, scale), 128, use_ue8m0)
        y = w[..., first : first + 64].permute(2, 0, 1).reshape(64, 512)
        for one, expected in zip(got, dsa.per_token_cast_to_fp8(y, use_ue8m0), strict=True):
            assert torch.equal(one.view(torch.uint8), expected.view(torch.uint8))


def test_a_token_does_not_depend_on_the_others():
    attended, kv_b = operands(33, 128, 128, 256)
    whole = dsa.mla_values_cast_to_fp8(attended, kv_b, 128)
    for part in (slice(5, 6), slice(3, 12), slice(8, 20), slice(1, 33)):
        for got, expected in zip(dsa.mla_values_cast_to_fp8(attended[part], kv_b, 128), whole, strict=True):
            assert torch.equal(got.view(torch.uint8), expected[part].view(torch.uint8))
    attended[0], attended[20] = torch.nan, torch.inf
    q, scale = dsa.mla_values_cast_to_fp8(attended, kv_b, 128)
    others = [*range(1, 20), *range(21, 33)]
    assert torch.equal(q.view(torch.uint8)[others], whole[0].view(torch.uint8)[others])
    assert torch.equal(scale[others], whole[1][others])
    assert scale[0].isnan().all() and q[0].float().isnan().all() and not scale[20].isfinite().any()


def test_tokens_and_heads_that_are_apart():
    """At any strides of 16 bytes."""
    attended, kv_b = operands(9, 4, 128, 256)
    wide = torch.full((9, 5, 3, 520), torch.nan, device="cuda", dtype=torch.bfloat16)
    view = wide[:, 1:, 2, 8:]
    view.copy_(attended)
    for got, expected in zip(
        dsa.mla_values_cast_to_fp8(view, kv_b, 128), dsa.mla_values_cast_to_fp8(attended, kv_b, 128), strict=True
    ):
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_in_a_cuda_graph():
    attended, kv_b = operands(2, 128, 128, 256)
    expected = dsa.mla_values_cast_to_fp8(attended, kv_b, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # What the kernel in front has written is read.
        got = dsa.mla_values_cast_to_fp8(attended * 1, kv_b, 128)
    for _ in range(3):
        graph.replay()
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
