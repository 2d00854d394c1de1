"""Linear layers and routed experts of FP8 and FP4 weights, which stay where an engine has loaded them."""

from collections.abc import Sequence
from typing import Any

import torch

import dsa
from dsa_engines import first_use

BLOCK = 128  # channels that share a scale
# Prompts may compute keys and values from the latents of new and earlier tokens, up to about LATENTS times the tokens
# of a step.
LATENT_DIM, LATENTS = 512, 4
AT_ONCE = 16  # experts
SCALES = "dsa_block_scales"  # attribute of a layer whose FP4 weights stay as they were loaded: the block scales
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


def linear_is_compiled(
    engine: str, weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, use_ue8m0: bool, most_tokens: int
) -> bool:
    """Compile `linear` for layers of this shape and up to most_tokens tokens (`first_use.is_ready`)."""

    def call(tokens: int) -> torch.Tensor:
        x = torch.zeros(tokens, weight.shape[1], dtype=dtype, device=weight.device)
        return linear(x, weight, scale, use_ue8m0)

    most = most_tokens * (LATENTS if weight.shape[1] <= LATENT_DIM else 1)
    return first_use.is_ready(engine, "linear", (tuple(weight.shape), use_ue8m0), call, most)


def fp4_weights(packed: torch.Tensor, scale: torch.Tensor, block_scale: torch.Tensor) -> FP4Weights:
    """The weights of `routed_experts` from packed [E, N, K / 2] bytes, scale [E, N, K / 32] e8m0 or bytes, and their
    `fp4_block_scales`. Nothing is copied."""
    return packed.view(torch.uint8), scale.view(torch.float8_e8m0fnu), block_scale


def fp4_layer_weights(layer: Any, suffix: str, scales: Sequence[torch.Tensor]) -> tuple[FP4Weights, FP4Weights]:
    """gate_up and down of `routed_experts`, of an engine's layer: `w13_weight` and `w2_weight` with the scales
    `w13_weight_{suffix}` and `w2_weight_{suffix}`, and these block scales."""
    pairs = ((getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_{suffix}")) for name in ("w13", "w2"))
    return tuple(fp4_weights(*pair, scale) for pair, scale in zip(pairs, scales, strict=True))


def kept_fp4_weights(layer: Any, suffix: str) -> tuple[FP4Weights, FP4Weights] | None:
    """`fp4_layer_weights` of a layer with SCALES; None without them."""
    scales = getattr(layer, SCALES, None)
    return None if scales is None else fp4_layer_weights(layer, suffix, scales)


def fp4_block_scales(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`dsa.fp4_block_scales` of E experts' bytes. Raises ValueError for scales that the products do not take."""
    # The op widens what it is given. So few experts at a time.
    parts = zip(packed.view(torch.uint8).split(AT_ONCE), scale.view(torch.float8_e8m0fnu).split(AT_ONCE), strict=True)
    return torch.cat([dsa.fp4_block_scales(*part) for part in parts])


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


def experts_are_compiled(
    engine: str,
    gate_up: FP8Weights | FP4Weights,
    down: FP8Weights | FP4Weights,
    chosen: int,
    limit: float | None,
    most_tokens: int,
) -> bool:
    """Compile `routed_experts` for weights of these shapes, `chosen` experts per token, and up to most_tokens tokens
    (`first_use.is_ready`)."""
    first, is_fp4 = gate_up[0], len(gate_up) == 3
    channels = first.shape[2] * (2 if is_fp4 else 1)

    def call(tokens: int) -> torch.Tensor:
        entries = torch.arange(tokens * chosen, dtype=torch.int32, device=first.device).view(tokens, chosen)
        x = torch.zeros(tokens, channels, dtype=torch.bfloat16, device=first.device)
        return routed_experts(x, entries % len(first), entries.float(), gate_up, down, limit, is_fp4)

    kind = tuple(first.shape), len(gate_up), chosen, limit
    return first_use.is_ready(engine, "experts", kind, call, most_tokens)
