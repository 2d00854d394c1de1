"""`mla_absorb_queries` on the CPU: the arguments of the kernel."""

import pytest
import torch

import dsa


def operands(tokens=3, heads=2, nope=128, rope=64, rows=256, latent=512):
    q = torch.randn(tokens, heads, nope + rope).bfloat16()
    angles = torch.randn(tokens, rope // 2)
    kv_b = dsa.per_block_cast_to_fp8(torch.randn(heads * rows, latent))
    return q[..., :nope], q[..., nope:], angles.cos(), angles.sin(), kv_b


@pytest.mark.parametrize("nope", [128, 192])
def test_what_the_kernel_gets(nope, launches):
    q_nope, q_pe, cos, sin, kv_b = operands(nope=nope, rows=448)
    q = dsa.mla_absorb_queries(q_nope, q_pe, cos, sin, kv_b)
    [(variant, (of_nope, of_pe, *rest, out))] = launches
    assert variant == (nope,) and out is q and q.shape == (3, 2, 576) and q.is_contiguous()
    assert (of_nope.data_ptr(), of_nope.stride()) == (q_nope.data_ptr(), q_nope.stride())
    assert (of_pe.data_ptr(), of_pe.stride()) == (q_pe.data_ptr(), q_pe.stride())
    assert all(got is given for got, given in zip(rest, (cos, sin, *kv_b), strict=True))
