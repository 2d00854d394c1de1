"""SGLang's FP8 linear layers on dsa's GEMMs."""

from collections.abc import Callable
from typing import Any

import torch

from dsa_engines import products

KERNEL = "deepgemm_w8a8_block_fp8_linear_with_fallback"  # SGLang's kernel on Hopper


def apply(most_tokens: Callable[[], int]) -> Callable[..., torch.Tensor]:
    """Return the hook of `Fp8LinearMethod.apply`. most_tokens: returns the largest number of tokens per batch."""

    def hook(
        original: Callable[..., torch.Tensor],
        method: Any,
        layer: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        kernel, scale = method.w8a8_block_fp8_linear, getattr(layer, "weight_scale_inv", None)
        # SGLang may set act_scale_ue8m0, the kind of activation scales, with `functools.partial`.
        function, options = getattr(kernel, "func", kernel), getattr(kernel, "keywords", {})
        if (
            getattr(function, "__name__", None) != KERNEL
            or options.keys() - {"act_scale_ue8m0"}
            or not method.block_quant
            or method.block_fp8_as_mxfp8
            or list(method.weight_block_size) != [products.BLOCK, products.BLOCK]
            or not isinstance(x, torch.Tensor)
            or x.dtype != torch.bfloat16
            or scale is None
            or scale.dtype != torch.float32
        ):
            return original(method, layer, x, bias)
        weight, use_ue8m0 = layer.weight, options.get("act_scale_ue8m0", False)
        if not products.linear_is_compiled("sglang", weight, scale, x.dtype, use_ue8m0, most_tokens()):
            return original(method, layer, x, bias)
        y = products.linear(x, weight, scale, use_ue8m0)
        return y if bias is None else y + bias

    return hook
