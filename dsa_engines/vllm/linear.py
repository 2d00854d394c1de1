"""vLLM's FP8 linear layers on dsa's products."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsa_engines import first_use, products

KERNEL = "DeepGemmFp8BlockScaledMMKernel"  # vLLM's own for weights of such shapes on Hopper
# `prefill` computes keys and values from the latents of new and earlier tokens, up to about LATENTS times the tokens of
# a step.
LATENT_DIM, LATENTS = 512, 4


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

        def call(tokens: int) -> torch.Tensor:
            zeros = torch.zeros(tokens, weight.shape[1], dtype=x.dtype, device=x.device)
            return products.linear(zeros, weight, scale, use_ue8m0)

        most = most_tokens * (LATENTS if weight.shape[1] <= LATENT_DIM else 1)
        if not first_use.is_ready("vllm", "linear", (tuple(weight.shape), use_ue8m0), call, most):
            return original(self, layer, x, bias)
        y = products.linear(x, weight, scale, use_ue8m0)
        return y if bias is None else y + bias

    return apply
