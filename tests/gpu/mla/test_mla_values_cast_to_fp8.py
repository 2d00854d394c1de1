"""W_UV applied to attended latents and cast, on the GPU: the bytes of bmm with dequantised weights and the cast."""

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from tests.gpu.mla.up_projections import TOKENS, dequantized, product, projection, with_value
from tests.gpu.op_checks import assert_equal, assert_same_bits, replays

# heads, value channels, rows of a head: V3.2's, GLM-5's, a GPU's share of each, heads at any multiple of 32 rows
HEADS = [(128, 128, 256), (64, 256, 448), (16, 128, 256), (8, 256, 448), (5, 128, 160), (3, 256, 288)]


def operands(tokens, heads, rows):
    """Heads of a token differ in size."""
    attended = torch.randn(tokens, heads, 512, device="cuda") * torch.logspace(-4, 3, heads, device="cuda")[:, None]
    return attended.bfloat16(), projection(heads, rows)


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("heads, v_dim, rows", HEADS)
def test_against_float64(tokens, heads, v_dim, rows, use_ue8m0, record_error):
    attended, kv_b = operands(tokens, heads, rows)
    poison_free_memory(mebibytes=64)
    q, scale = dsa.mla_values_cast_to_fp8(attended, kv_b, v_dim, use_ue8m0)
    products = product("thc,hvc->thv", attended, dequantized(kv_b, heads)[:, -v_dim:])
    expected, bound, size = (x.reshape(tokens, -1, 128) for x in products)
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
def test_nearly_all_bytes_are_those_of_bmm_and_the_cast(heads, v_dim, rows, use_ue8m0):
    attended, kv_b = operands(16, heads, rows)
    q, scale = dsa.mla_values_cast_to_fp8(attended, kv_b, v_dim, use_ue8m0)
    y = torch.bmm(attended.transpose(0, 1), dequantized(kv_b, heads)[:, -v_dim:].mT).transpose(0, 1)
    expected, scales = dsa.per_token_cast_to_fp8(y.flatten(1), use_ue8m0)
    same = scale == scales
    assert same.float().mean() > 0.9
    bytes_differ = q.view(torch.uint8).view(*scale.shape, 128) != expected.view(torch.uint8).view(*scale.shape, 128)
    assert bytes_differ[same].float().mean() < 0.02


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("value", [2.0**-9, 0.0, 448.0, -448.0])
def test_the_cast_of_a_single_weight_is_exact(value, use_ue8m0):
    """One latent channel of a token is 1: y is a column of weights, to the bit, and so is its cast."""
    kv_b = with_value(projection(4, 256), value)
    w = dequantized(kv_b, 4)[:, -128:]
    for first in range(0, 512, 64):
        attended = torch.zeros(64, 4, 512, device="cuda", dtype=torch.bfloat16)
        attended[torch.arange(64), :, torch.arange(first, first + 64)] = 1
        y = w[..., first : first + 64].permute(2, 0, 1).reshape(64, 512)
        got = dsa.mla_values_cast_to_fp8(attended, kv_b, 128, use_ue8m0)
        assert_equal(got, dsa.per_token_cast_to_fp8(y, use_ue8m0))


def test_a_token_does_not_depend_on_the_others():
    attended, kv_b = operands(33, 128, 256)
    whole = dsa.mla_values_cast_to_fp8(attended, kv_b, 128)
    for part in (slice(5, 6), slice(3, 12), slice(8, 20), slice(1, 33)):
        assert_same_bits(dsa.mla_values_cast_to_fp8(attended[part], kv_b, 128), [x[part] for x in whole])
    attended[0], attended[20] = torch.nan, torch.inf
    q, scale = dsa.mla_values_cast_to_fp8(attended, kv_b, 128)
    for others in (slice(1, 20), slice(21, 33)):
        assert_same_bits((q[others], scale[others]), [x[others] for x in whole])
    assert scale[0].isnan().all() and q[0].float().isnan().all() and not scale[20].isfinite().any()


def test_a_graph_reads_what_the_kernel_before_has_written():
    attended, kv_b = operands(2, 128, 256)

    def after_a_kernel(attended):
        return dsa.mla_values_cast_to_fp8(attended * 1, kv_b, 128)

    for got in replays(after_a_kernel, (attended,), lambda: torch.randn_like(attended)):
        assert_same_bits(got, dsa.mla_values_cast_to_fp8(attended, kv_b, 128))
