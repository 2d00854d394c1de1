"""W_UK absorbed into the queries, against float64 and against the layers' steps by themselves."""

import pytest
import torch

from dsa.reference import apply_rotary, dequantize_per_block, mla_absorb_queries, per_block_cast_to_fp8
from tests.reference.common import assert_refused


def operands(tokens=5, heads=4, nope=64, value=96, latent=256, dtype=torch.bfloat16):
    """Rows of a head that begin inside of a block of 128."""
    q = torch.randn(tokens, heads, nope + 16).to(dtype)
    angles = torch.randn(tokens, 8)
    kv_b = per_block_cast_to_fp8(torch.randn(heads * (nope + value), latent), use_ue8m0=False)
    return q[..., :nope], q[..., nope:], angles.cos(), angles.sin(), kv_b


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_formula(dtype):
    q_nope, q_pe, cos, sin, kv_b = operands(dtype=dtype)
    got = mla_absorb_queries(q_nope, q_pe, cos, sin, kv_b)
    w = dequantize_per_block(*kv_b, dtype).double().view(4, 160, 256)
    expected = torch.stack([q_nope[:, h].double() @ w[h, :64] for h in range(4)], 1)
    assert got.dtype == dtype and got.shape == (5, 4, 272)
    torch.testing.assert_close(got[..., :256].double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(got[..., 256:], apply_rotary(q_pe, cos, sin, interleaved=True))


def test_the_weight_is_rounded_before_it_is_multiplied():
    """A scale of 1 + 2^-10 is lost in bf16 beside a weight of 1."""
    kv_b = torch.ones(2, 128).to(torch.float8_e4m3fn), torch.full((1, 1), 1 + 2**-10)
    q_nope, q_pe, angles = torch.ones(1, 1, 1), torch.zeros(1, 1, 0), torch.zeros(1, 0)
    for dtype, expected in ((torch.bfloat16, 1.0), (torch.float32, 1 + 2**-10)):
        got = mla_absorb_queries(q_nope.to(dtype), q_pe.to(dtype), angles, angles, kv_b)
        assert (got == expected).all()


@pytest.mark.parametrize("tokens, heads", [(0, 4), (3, 0)])
def test_empty(tokens, heads):
    assert mla_absorb_queries(*operands(tokens=tokens, heads=heads)).shape == (tokens, heads, 272)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (642, r"kv_b\[0\]: rows must be a multiple of the 4 heads of q_nope, got 642"),
        (128, r"kv_b\[0\]: must have at least 64 rows a head, got 128 for 4 heads"),
    ],
)
def test_rows_that_are_not_the_heads(rows, message):
    q_nope, q_pe, cos, sin, _ = operands()
    kv_b = per_block_cast_to_fp8(torch.randn(rows, 256))
    assert_refused(message, mla_absorb_queries, q_nope, q_pe, cos, sin, kv_b)
