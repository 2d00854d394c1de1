"""Queries for attention to latents: the product of the queries with MLA's FP8 weight W_UK, and the rotated rope
channels."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.elementwise.rotary import apply_rotary
from dsa.reference.gemm.fp8_cast import dequantize_per_block


def by_head(
    weight: torch.Tensor, weight_scale: torch.Tensor, heads: int, dtype: torch.dtype, least: int
) -> torch.Tensor:
    """Return kv_b as [H, N, L] in `dtype`: per head the N rows of W_UK and W_UV, each of L latent channels. It is
    contiguous, so that sums do not depend on the weight's strides.

    least: the value of N if there are no heads.
    """
    rows = len(weight) // heads if heads else least
    return dequantize_per_block(weight.contiguous(), weight_scale, dtype).view(heads, rows, weight.shape[1])


@without_autocast
@torch.no_grad()
def mla_absorb_queries(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_b: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """q[t, h] = [sum_d q_nope[t, h, d] W_UK[h][d] | rope(q_pe[t, h])].

    W_UK[h][d] is row d of head h in kv_b, dequantised to q_nope's dtype. Products are summed in fp32, and the sum is
    rounded to q_nope's dtype. Arguments as in `dsa.mla_absorb_queries`.
    """
    heads, nope = q_nope.shape[1:]
    w_uk = by_head(*kv_b, heads, q_nope.dtype, nope)[:, :nope]
    absorbed = torch.einsum("thd,hdc->thc", q_nope.float(), w_uk.float()).to(q_nope.dtype)
    return torch.cat((absorbed, apply_rotary(q_pe, cos, sin, interleaved=True)), -1)
