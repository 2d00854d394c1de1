"""vLLM's FP8 linear layers on dsa's products."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsa_engines import products

KERNEL = "DeepGemmFp8BlockScaledMMKernel"  # vLLM's own for weights of such shapes on Hopper


def apply_weights(original: Callable[..., torch.Tensor], most_tokens: int) -> Callable[..., torch.Tensor]:
    """`Fp8BlockScaledMMLinearKernel.apply_weights`, where vLLM calls DeepGEMM."""

    @functools.wraps(original)
    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        scale = getattr(layer, "weight_scale_inv", None)
        if (
            type(self).__name__ != KERNEL
            or options
            or x.dtype != self.config.out_dtype
            or scale is None
            or scale.dtype != torch.float32
        ):
            return original(self, layer, x, bias, **options)
        weight, use_ue8m0 = layer.weight, self.use_deep_gemm_e8m0
        if not products.linear_is_compiled("vllm", weight, scale, x.dtype, use_ue8m0, most_tokens):
            return original(self, layer, x, bias)
        y = products.linear(x, weight, scale, use_ue8m0)
        return y if bias is None else y + bias

    return apply
