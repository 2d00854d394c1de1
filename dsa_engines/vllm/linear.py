"""vLLM's FP8 linear layers on dsa's products."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsa_engines import products

KERNEL = "DeepGemmFp8BlockScaledMMKernel"  # vLLM's own for weights of such shapes on Hopper
LATENT_DIM = 512
LATENTS = 4  # times the tokens of a step, at which `prefill` is not chosen any more

_compiled: set[tuple[int, int]] = set()


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
        use_ue8m0 = self.use_deep_gemm_e8m0
        _compile(layer.weight, scale, x.dtype, use_ue8m0, most_tokens)
        y = products.linear(x, layer.weight, scale, use_ue8m0)
        return y if bias is None else y + bias

    return apply


def _compile(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, use_ue8m0: bool, most_tokens: int) -> None:
    """The first layer of a shape compiles for all numbers of tokens. Keys and values are also made of the latents of
    earlier tokens, which are more than those of a step."""
    most = most_tokens * (LATENTS if weight.shape[1] <= LATENT_DIM else 1)
    if tuple(weight.shape) in _compiled or torch.cuda.is_current_stream_capturing():
        return
    _compiled.add(tuple(weight.shape))

    def call(tokens: int) -> None:
        x = torch.zeros(tokens, weight.shape[1], dtype=dtype, device=weight.device)
        products.linear(x, weight, scale, use_ue8m0)

    products.compile_for_all_rows(call, most)
