"""W_UV applied to attended latents and cast, against the steps by themselves."""

import pytest
import torch

from dsa.reference import dequantize_per_block, mla_values_cast_to_fp8, per_block_cast_to_fp8, per_token_cast_to_fp8
from tests.reference.common import assert_refused


def operands(tokens=5, heads=3, nope=64, value=256, latent=256, dtype=torch.bfloat16):
    """Rows of a head that begin inside of a block of 128."""
    kv_b = per_block_cast_to_fp8(torch.randn(heads * (nope + value), latent), use_ue8m0=False)
    return torch.randn(tokens, heads, latent).to(dtype), kv_b


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_steps(dtype, use_ue8m0):
    attended, kv_b = operands(dtype=dtype)
    q, scale = mla_values_cast_to_fp8(attended, kv_b, 256, use_ue8m0)
    w = dequantize_per_block(*kv_b, dtype).float().view(3, 320, 256)
    y = torch.stack([attended[:, h].float() @ w[h, 64:].T for h in range(3)], 1).to(dtype)
    expected, scales = per_token_cast_to_fp8(y.flatten(1), use_ue8m0)
    assert q.shape == (5, 768) and q.is_contiguous() and scale.shape == (5, 6) and scale.is_contiguous()
    # Sums of another order may round y, and then a byte, the other way.
    torch.testing.assert_close(scale, scales, rtol=0 if use_ue8m0 else 2**-7, atol=0)
    assert (q.float() != expected.float()).float().mean() < 0.01
    torch.testing.assert_close(q.float(), expected.float(), rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("tokens, heads", [(0, 3), (3, 0)])
def test_empty(tokens, heads):
    attended, kv_b = operands(tokens=tokens, heads=heads)
    q, scale = mla_values_cast_to_fp8(attended, kv_b, 256)
    assert q.shape == (tokens, heads * 256) and scale.shape == (tokens, heads * 2)


@pytest.mark.parametrize(
    ("v_dim", "rows", "message"),
    [
        (200, 960, "v_dim: must be a multiple of 128, got 200"),
        (256, 961, r"kv_b\[0\]: rows must be a multiple of the 3 heads of attended, got 961"),
        (384, 960, r"kv_b\[0\]: must have at least 384 rows a head, got 960 for 3 heads"),
    ],
)
def test_wrong_arguments_are_named(v_dim, rows, message):
    assert_refused(message, mla_values_cast_to_fp8, operands()[0], per_block_cast_to_fp8(torch.randn(rows, 256)), v_dim)
