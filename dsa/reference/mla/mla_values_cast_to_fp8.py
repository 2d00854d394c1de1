"""Values of attended latents: MLA's W_UV, in FP8, applied to what a head attended to, and the result cast to FP8."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.gemm.fp8_cast import per_token_cast_to_fp8
from dsa.reference.gemm.fp8_gemm_nt import pair
from dsa.reference.mla.mla_absorb_queries import KV_B, by_head, check_heads
from dsa.runtime.arguments import ROWS, Arguments, Flag, Int, Tensor
from dsa.runtime.checks import FLOATS, check_memory

GROUP = 128  # channels that share a scale


def _check(attended: torch.Tensor, weight: torch.Tensor, v_dim: int) -> None:
    if v_dim % GROUP:
        raise ValueError(f"v_dim: must be a multiple of {GROUP}, got {v_dim}")
    check_heads(weight, attended.shape[1], v_dim, "attended")


MLA_VALUES_CAST_TO_FP8 = Arguments(
    rule=_check,
    attended=Tensor("T H L", FLOATS, layout=ROWS),
    **KV_B,
    v_dim=Int(),
    use_ue8m0=Flag(),
)


@without_autocast
@torch.no_grad()
def mla_values_cast_to_fp8(
    attended: torch.Tensor, kv_b: tuple[torch.Tensor, torch.Tensor], v_dim: int, use_ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_token_cast_to_fp8` of y[t, h] = W_UV[h] attended[t, h], W_UV dequantised to attended's dtype, sums in fp32.

    y is rounded to that dtype before the cast. Arguments as of `dsa.mla_values_cast_to_fp8`.
    """
    weight, weight_scale = pair("kv_b", kv_b)
    MLA_VALUES_CAST_TO_FP8.check(attended, weight, weight_scale, v_dim, use_ue8m0)
    check_memory("attended", attended)
    w_uv = by_head(weight, weight_scale, attended.shape[1], attended.dtype, v_dim)[:, -v_dim:]
    y = torch.einsum("thc,hvc->thv", attended.float(), w_uv.float()).to(attended.dtype)
    return per_token_cast_to_fp8(y.flatten(1), use_ue8m0)
