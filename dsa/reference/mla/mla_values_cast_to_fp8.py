"""The product of MLA's FP8 weight W_UV with each head's attention result over the latents, cast to FP8."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8
from dsa.reference.mla.mla_absorb_queries import by_head


@without_autocast
@torch.no_grad()
def mla_values_cast_to_fp8(
    attended: torch.Tensor, kv_b: tuple[torch.Tensor, torch.Tensor], v_dim: int, use_ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_token_cast_to_fp8` of y[t, h] = W_UV[h] attended[t, h], W_UV dequantised to attended's dtype, sums in fp32.

    W_UV[h] is the last v_dim rows of head h in kv_b. y is rounded to attended's dtype before the cast. Arguments as in
    `dsa.mla_values_cast_to_fp8`.
    """
    w_uv = by_head(*kv_b, attended.shape[1], attended.dtype, v_dim)[:, -v_dim:]
    y = torch.einsum("thc,hvc->thv", attended.float(), w_uv.float()).to(attended.dtype)
    return per_token_cast_to_fp8(y.flatten(1), use_ue8m0)
