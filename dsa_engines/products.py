"""Linear layers and routed experts of FP8 and FP4 weights, which stay where an engine has loaded them."""

import torch

import dsa

BLOCK = 128  # channels that share a scale
FP8Weights = tuple[torch.Tensor, torch.Tensor]
FP4Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, use_ue8m0: bool = False) -> torch.Tensor:
    """x W^T in x's dtype, x cast to FP8 with a scale per token and 128 channels.

    x          [..., K] bf16
    weight     [N, K] e4m3
    scale      [ceil(N / 128), ceil(K / 128)] fp32
    use_ue8m0  whether the scales of x are powers of two
    """
    rows = x.reshape(-1, x.shape[-1])
    product = dsa.fp8_gemm_nt(dsa.per_token_cast_to_fp8(rows, use_ue8m0), (weight, scale), x.dtype)
    return product.view(*x.shape[:-1], len(weight))


def fp4_weights(packed: torch.Tensor, scale: torch.Tensor, block_scale: torch.Tensor) -> FP4Weights:
    """The weights of `routed_experts` from packed [E, N, K / 2] bytes, scale [E, N, K / 32] e8m0 or bytes, and their
    `fp4_block_scales`. Nothing is copied."""
    return packed.view(torch.uint8), scale.view(torch.float8_e8m0fnu), block_scale


def fp4_block_scales(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`dsa.fp4_block_scales` of bytes. Raises ValueError for scales that the products do not take."""
    return dsa.fp4_block_scales(packed.view(torch.uint8), scale.view(torch.float8_e8m0fnu))


def routed_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: FP8Weights | FP4Weights,
    down: FP8Weights | FP4Weights,
    limit: float | None,
    use_ue8m0: bool,
    by_expert: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """[T, H] in x's dtype: sum_j weights[t, j] SwiGLU_{experts[t, j]}(x[t]), summed in fp32.

    x          [T, H] bf16
    experts    [T, k] int32 or int64: numbers of this GPU's experts; entries outside [0, E) are ignored
    weights    [T, k] fp32
    gate_up    of E experts, [E, 2 I, H], the gate projection before the up projection: (e4m3, fp32 scales of 128 x 128
               blocks), or those of `fp4_weights`
    down       the same of [E, H, I]
    limit      gate(x) is clamped to at most limit, up(x) to [-limit, limit]; None: no clamp
    use_ue8m0  whether the scales of activations are powers of two
    by_expert  the results of `dsa.sort_by_expert` for these experts, if the caller has them
    """
    is_fp4 = len(gate_up) == 3
    swiglu = dsa.grouped_fp8_fp4_gemm_swiglu if is_fp4 else dsa.grouped_fp8_gemm_swiglu
    product = dsa.grouped_fp8_fp4_gemm_nt if is_fp4 else dsa.grouped_fp8_gemm_nt
    order, rows, ends = dsa.sort_by_expert(experts, len(gate_up[0])) if by_expert is None else by_expert
    if len(x) == 1:
        cast = tuple(part.expand(len(order), -1) for part in dsa.per_token_cast_to_fp8(x, use_ue8m0))
    else:
        cast = dsa.scatter_cast_to_fp8(x, rows, use_ue8m0)
    h = swiglu(cast, gate_up, ends, limit=limit, use_ue8m0=use_ue8m0, dtype=x.dtype)
    return dsa.combine_experts(product(h, down, ends, x.dtype), rows, weights)
