"""vLLM's routed experts of FP8 and FP4 weights on dsa's grouped products.

vLLM's own methods stay in place and decide how experts are shared between GPUs. Both kinds of weights keep the
checkpoint's layout. For FP4 weights the plugin skips vLLM's conversion for Marlin.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from dsa_engines import products
from dsa_engines.vllm import routing

CHECKPOINT_LAYOUTS = ("TRITON", "DEEPGEMM")  # vLLM's kernels of FP8 experts that leave the weights as they are
_logger = logging.getLogger("vllm.dsa")


def is_served(method: Any, layer: Any) -> bool:
    """Return whether dsa serves this layer's experts. They may be split by tensor or expert parallelism."""
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
    """The weights of `Mxfp4MoEMethod`; None unless `fp4_setup` has left them in the checkpoint's layout."""
    return products.kept_fp4_weights(layer, "scale")


def fp4_setup(original: Callable[..., None], most_tokens: int) -> Callable[..., None]:
    """`Mxfp4MoEMethod._setup_kernel`: leaves the weights as they were loaded, if dsa can serve them.

    When vLLM loads weights again it calls this with other tensors, whose values it then copies into the layer's. The
    block scales are updated in place, too, because CUDA graphs may read them. With EPLB, which moves experts between
    GPUs, they would not move.
    """

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
        earlier = layer.__dict__.pop(products.SCALES, None)
        if (
            self.mxfp4_backend.name == "MARLIN"
            and not self.moe.moe_parallel_config.enable_eplb
            and is_served(self, layer)
        ):
            try:
                scales = tuple(products.fp4_block_scales(*pair) for pair in ((w13, w13_scale), (w2, w2_scale)))
            except ValueError as error:
                _logger.warning("dsa: vllm: %s; experts of a layer stay the engine's own", " ".join(str(error).split()))
            else:
                if earlier is not None:
                    scales = tuple(old.copy_(new) for old, new in zip(earlier, scales, strict=True))
                if _is_compiled(self, layer, products.fp4_layer_weights(layer, "scale", scales), most_tokens):
                    setattr(layer, products.SCALES, scales)
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
        limit, is_fp4 = getattr(layer, "swiglu_limit", None), len(weights[0]) == 3
        by_expert = routing.by_expert(topk_ids)
        return products.routed_experts(x, topk_ids, topk_weights.float(), *weights, limit, is_fp4, by_expert)

    return outputs


def _is_compiled(method: Any, layer: Any, weights: Weights, most_tokens: int) -> bool:
    """At the first layer of a shape, compile for numbers of tokens up to most_tokens."""
    limit = getattr(layer, "swiglu_limit", None)
    return products.experts_are_compiled("vllm", *weights, method.moe.experts_per_token, limit, most_tokens)
