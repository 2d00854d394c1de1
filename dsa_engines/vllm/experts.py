"""vLLM's routed experts of FP8 and FP4 weights on dsa's grouped products.

vLLM's own methods stay in place and decide how experts are shared between GPUs. FP8 weights lie in memory as in the
checkpoint. FP4 weights stay so, too: the conversion to the engine's kernel is left out.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from dsa_engines import products
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


def fp8_apply(original: Callable[..., Any], most_tokens: int) -> Callable[..., Any]:
    """`Fp8MoEMethod.apply`: the sum over a token's experts of this GPU."""

    @functools.wraps(original)
    def apply(
        self: Any,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> Any:
        is_fp8 = self.block_quant and list(self.moe_block_shape) == [products.BLOCK, products.BLOCK]
        is_fp8 = is_fp8 and self.fp8_backend.name in CHECKPOINT_LAYOUTS
        if not (is_fp8 and layer.w13_weight_scale_inv.dtype == torch.float32 and is_served(self, layer)):
            return original(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        gate_up = layer.w13_weight, layer.w13_weight_scale_inv
        down = layer.w2_weight, layer.w2_weight_scale_inv
        return _outputs(layer, x, topk_weights, topk_ids, gate_up, down, False, most_tokens)

    return apply


def fp4_setup(original: Callable[..., None]) -> Callable[..., None]:
    """`Mxfp4MoEMethod._setup_kernel`: leaves the weights as they were loaded."""

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
        if not is_served(self, layer):
            return original(self, layer, w13, w2, w13_scale, w2_scale, w13_bias, w2_bias)
        pairs = (w13, w13_scale), (w2, w2_scale)
        setattr(layer, WEIGHTS, tuple(products.fp4_weights(weight.data, scale.data) for weight, scale in pairs))
        self._build_moe_kernel(layer)

    return setup


def fp4_apply(original: Callable[..., Any], most_tokens: int) -> Callable[..., Any]:
    """`Mxfp4MoEMethod.apply`: the sum over a token's experts of this GPU."""

    @functools.wraps(original)
    def apply(
        self: Any,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> Any:
        weights = getattr(layer, WEIGHTS, None)
        if weights is None:
            return original(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        return _outputs(layer, x, topk_weights, topk_ids, *weights, True, most_tokens)

    return apply


def _outputs(
    layer: Any,
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Any,
    down: Any,
    use_ue8m0: bool,
    most_tokens: int,
) -> torch.Tensor:
    setattr(layer, routing.SERVED, True)
    limit = getattr(layer, "swiglu_limit", None)

    def outputs(x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        by_expert = routing.by_expert(experts)
        return products.routed_experts(x, experts, weights, gate_up, down, limit, use_ue8m0, by_expert)

    # The first layer of a shape compiles for all numbers of tokens. The engine calls all layers before it captures.
    _compile(outputs, x.device, (*gate_up[0].shape, experts.shape[1], limit, use_ue8m0, most_tokens), x.shape[1])
    if layer.expert_map is not None:
        experts = torch.where(experts < 0, -1, layer.expert_map[experts.clamp(min=0).long()])
    return outputs(x, experts, weights.float())


_compiled: set[tuple[Any, ...]] = set()


def _compile(outputs: Callable[..., Any], device: torch.device, sizes: tuple[Any, ...], channels: int) -> None:
    if sizes in _compiled or torch.cuda.is_current_stream_capturing():
        return
    _compiled.add(sizes)
    count, chosen, most_tokens = sizes[0], sizes[-4], sizes[-1]

    def call(tokens: int) -> None:
        experts = torch.arange(tokens * chosen, dtype=torch.int32, device=device).view(tokens, chosen) % count
        x = torch.zeros(tokens, channels, dtype=torch.bfloat16, device=device)
        outputs(x, experts, torch.zeros(tokens, chosen, device=device))

    products.compile_for_all_rows(call, most_tokens)
