"""vLLM's routed experts of FP8 and FP4 weights on dsa's grouped products.

vLLM's own methods stay in place and decide how experts are shared between GPUs. FP8 weights lie in memory as in the
checkpoint. FP4 weights stay so, too: the conversion to the engine's kernel is left out.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsa_engines import first_use, products
from dsa_engines.vllm import routing

CHECKPOINT_LAYOUTS = ("TRITON", "DEEPGEMM")  # vLLM's kernels of FP8 experts that leave the weights as they are
WEIGHTS = "dsa_weights"  # of a layer: its FP4 weights with the scales that dsa computes of them


def is_served(method: Any, layer: Any) -> bool:
    """Whether a layer's experts are those that `products.routed_experts` computes, whole on this GPU or a part."""
    moe, parallel = method.moe, method.moe.moe_parallel_config
    return not (
        layer.activation.name != "SILU"
        or layer.apply_router_weight_on_input
        or moe.has_bias
        or moe.is_lora_enabled
        or parallel.dp_size > 1
        or parallel.use_all2all_kernels
        or parallel.use_passthrough_all2all
        or getattr(layer, "swiglu_alpha", None) is not None
        or getattr(layer, "swiglu_beta", None) is not None
        or moe.in_dtype != torch.bfloat16
    )


Weights = tuple[Any, Any]  # gate and up projections, and down projections, as `products.routed_experts` takes them


def fp8_weights(method: Any, layer: Any) -> Weights | None:
    """The weights of `Fp8MoEMethod`; None if the layer is not served."""
    if (
        not method.block_quant
        or list(method.moe_block_shape) != [products.BLOCK, products.BLOCK]
        or method.fp8_backend.name not in CHECKPOINT_LAYOUTS
        or layer.w13_weight_scale_inv.dtype != torch.float32
        or not is_served(method, layer)
    ):
        return None
    return (layer.w13_weight, layer.w13_weight_scale_inv), (layer.w2_weight, layer.w2_weight_scale_inv)


def fp4_weights(method: Any, layer: Any) -> Weights | None:
    """The weights of `Mxfp4MoEMethod` that `fp4_setup` has left as they are; None if the layer is not served."""
    return getattr(layer, WEIGHTS, None)


def fp4_setup(original: Callable[..., None], most_tokens: int) -> Callable[..., None]:
    """`Mxfp4MoEMethod._setup_kernel`: leaves the weights as they were loaded, if the kernels for them compile."""

    @functools.wraps(original)
    def setup(
        self: Any,
        layer: Any,
        w13: torch.Tensor,
        w2: torch.Tensor,
        w13_scale: torch.Tensor,
        w2_scale: torch.Tensor,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
    ) -> None:
        if is_served(self, layer):
            pairs = (w13, w13_scale), (w2, w2_scale)
            weights = tuple(products.fp4_weights(weight.data, scale.data) for weight, scale in pairs)
            if _is_compiled(self, layer, weights, most_tokens):
                setattr(layer, WEIGHTS, weights)
                self._build_moe_kernel(layer)
                return
        original(self, layer, w13, w2, w13_scale, w2_scale, w13_bias, w2_bias)

    return setup


def apply(
    original: Callable[..., Any], weights_of: Callable[[Any, Any], Weights | None], most_tokens: int
) -> Callable[..., Any]:
    """`apply` of a method of experts: the sum over a token's experts of this GPU."""

    @functools.wraps(original)
    def outputs(
        self: Any,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> Any:
        weights = weights_of(self, layer)
        if weights is None or not _is_compiled(self, layer, weights, most_tokens):
            return original(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        setattr(layer, routing.SERVED, True)
        if layer.expert_map is not None:
            topk_ids = torch.where(topk_ids < 0, -1, layer.expert_map[topk_ids.clamp(min=0).long()])
        by_expert = routing.by_expert(topk_ids)
        return _outputs(layer, x, topk_ids, topk_weights.float(), weights, by_expert)

    return outputs


def _outputs(
    layer: Any,
    x: torch.Tensor,
    experts: torch.Tensor,
    weights_of_experts: torch.Tensor,
    weights: Weights,
    by_expert: routing.SortedEntries | None = None,
) -> torch.Tensor:
    limit, is_fp4 = getattr(layer, "swiglu_limit", None), len(weights[0]) == 3
    return products.routed_experts(x, experts, weights_of_experts, *weights, limit, is_fp4, by_expert)


def _is_compiled(method: Any, layer: Any, weights: Weights, most_tokens: int) -> bool:
    """The first layer of a shape compiles for all numbers of tokens."""
    first, chosen = weights[0][0], method.moe.experts_per_token
    channels = first.shape[2] * (2 if len(weights[0]) == 3 else 1)

    def call(tokens: int) -> torch.Tensor:
        count = torch.arange(tokens * chosen, dtype=torch.int32, device=first.device)
        x = torch.zeros(tokens, channels, dtype=torch.bfloat16, device=first.device)
        return _outputs(layer, x, count.view(tokens, chosen) % len(first), count.view(tokens, chosen).float(), weights)

    kind = tuple(first.shape), len(weights[0]), chosen, getattr(layer, "swiglu_limit", None)
    return first_use.is_ready("vllm", "experts", kind, call, most_tokens)
