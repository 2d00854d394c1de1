"""Output of absorbed MLA: multiply each head's attention result by W_UV, which is FP8, and cast the product to FP8."""

import torch

from dsa.kernels.mla.limits import VALUE_GROUP
from dsa.ops.gemm._operands import pair
from dsa.ops.mla.mla_absorb_queries import KV_B, KV_B_LIMITS, check_head_rows, check_heads
from dsa.reference.mla import mla_values_cast_to_fp8 as reference
from dsa.runtime.declare import FLOATS, ROWS, Arguments, Flag, Int, Tensor, op, rows_at_16_bytes

__all__ = ["mla_values_cast_to_fp8"]


def _check(attended: torch.Tensor, weight: torch.Tensor, v_dim: int) -> None:
    if v_dim % VALUE_GROUP:
        raise ValueError(f"v_dim: must be a multiple of {VALUE_GROUP}, got {v_dim}")
    check_heads(weight, attended.shape[1], v_dim, "attended")


MLA_VALUES_CAST_TO_FP8 = Arguments(
    rule=_check,
    attended=Tensor("T H L", FLOATS, layout=ROWS),
    **KV_B,
    v_dim=Int(),
    use_ue8m0=Flag(),
)


def mla_values_cast_to_fp8(
    attended: torch.Tensor, kv_b: tuple[torch.Tensor, torch.Tensor], v_dim: int, use_ue8m0: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`per_token_cast_to_fp8(y)` with y[t, h] = W_UV[h] attended[t, h], heads concatenated: the input of o_proj.

    W_UV[h] consists of the last v_dim rows of head h in kv_b. A weight is e4m3 * scale, rounded to attended's dtype, as
    `dequantize_per_block` returns it. Products are summed in fp32, and y is rounded to attended's dtype before the
    cast.

    attended   [T, H, L] bf16 (fp16 or fp32 in the reference): each head's attention result over the latents
    kv_b       (w [H * N, L] e4m3, ws [ceil(H * N / 128), ceil(L / 128)] fp32), N at least v_dim: the weight of MLA's
               kv_b and its scales. The index of a head's first row need not be a multiple of 128
    v_dim      channels of a head's value, a multiple of 128
    use_ue8m0  True: a scale is max(amax(|y|), 1e-4) / 448, rounded up to a power of two; False: it is not rounded up

    Returns q [T, H * v_dim] float8_e4m3fn and scale [T, H * v_dim / 128] fp32, contiguous. Not differentiable. Without
    tokens or heads they are empty.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel for bf16, L = 512, N a multiple of 32; other dtypes run the PyTorch reference, with a warning.
    Meant for few tokens, where loading the weights takes most of the time; slow for many tokens. Deterministic, and a
    token's result does not depend on the other tokens. CUDA-graph safe, no host synchronisation.
    Source: `MLA` of DeepSeek-V3.2's inference code, decoding: `einsum("bshc,hdc->bshd", x, wkv_b[:, -v_dim:])`, and the
    cast before wo.
    """
    return _mla_values_cast_to_fp8(attended, *pair("kv_b", kv_b), v_dim, use_ue8m0)


def _results(attended: torch.Tensor, v_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads = attended.shape[:2]
    q = torch.empty((tokens, heads * v_dim), dtype=torch.float8_e4m3fn, device=attended.device)
    return q, torch.empty((tokens, heads * v_dim // VALUE_GROUP), dtype=torch.float32, device=attended.device)


@op(
    arguments=MLA_VALUES_CAST_TO_FP8,
    reference=reference.mla_values_cast_to_fp8,
    results=_results,
    limits=KV_B_LIMITS,
    rule=lambda attended, weight: check_head_rows(weight, attended.shape[1]),
    dtypes=(torch.bfloat16,),
)
def _mla_values_cast_to_fp8(
    attended: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    v_dim: int,
    use_ue8m0: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.mla.mla_values_cast_to_fp8_sm90 import compile_mla_values_cast_to_fp8

    q, scale = _results(attended, v_dim)
    if q.numel():
        launch = compile_mla_values_cast_to_fp8(use_ue8m0)
        launch(rows_at_16_bytes(attended), weight, weight_scale, q, scale)
    return q, scale
