"""SGLang's routed experts with FP8 and FP4 weights, on dsa's grouped GEMMs.

SGLang's methods still decide how experts are distributed over GPUs. FP8 weights keep SGLang's layout. FP4 weights keep
the checkpoint's layout: the plugin skips SGLang's conversion for Marlin or FlashInfer.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from dsa_engines import products

Hook = Callable[..., Any]
Weights = tuple[Any, Any]  # gate_up and down, as `products.routed_experts` takes them
_logger = logging.getLogger("dsa")


def is_served(config: Any) -> bool:
    """Return whether dsa supports this `MoeRunnerConfig`."""
    return (
        config.activation == "silu"
        and config.is_gated
        and not config.apply_router_weight_on_input
        and not config.no_combine
        and not config.silu_mul_keep_fp32
        and config.gemm1_alpha is None
        and config.gemm1_clamp_limit is None
    )


def fp8_weights(method: Any, layer: Any) -> Weights | None:
    """Return the weights of `Fp8MoEMethod`, or None if dsa does not serve the layer."""
    runner = getattr(method, "runner", None)
    if (
        runner is None
        or not (runner.runner_backend.is_triton() or runner.runner_backend.is_deep_gemm())
        or not method.block_quant
        or method.use_mxfp8
        or list(method.weight_block_size) != [products.BLOCK, products.BLOCK]
        or layer.w13_weight.dtype != torch.float8_e4m3fn
        or layer.w13_weight_scale_inv.dtype != torch.float32
        or getattr(layer, "w13_weight_bias", None) is not None
        or layer.w13_input_scale is not None
        or not is_served(runner.config)
    ):
        return None
    return (layer.w13_weight, layer.w13_weight_scale_inv), (layer.w2_weight, layer.w2_weight_scale_inv)


def fp4_weights(method: Any, layer: Any) -> Weights | None:
    """Return the FP4 weights, or None unless `fp4_setup` left them in the checkpoint's layout."""
    return products.kept_fp4_weights(layer, "scale_inv")


def fp4_setup(keeps_fp4: Callable[[], bool], most_tokens: Callable[[], int], wants_up_first: bool) -> Hook:
    """Return the hook of `process_weights_after_loading`. If dsa can serve a layer, the hook leaves the weights as they
    were loaded, in the checkpoint's layout.

    keeps_fp4       returns whether dsa serves the model's FP4 experts; gate projections are then loaded before up
                    projections
    most_tokens     returns the largest number of tokens per batch
    wants_up_first  whether SGLang's conversion takes the up projections first

    SGLang calls the hook again after it has loaded other weights into the same memory. The hook then updates the block
    scales in place, because CUDA graphs may read them.
    """

    def hook(original: Callable[..., None], method: Any, layer: Any) -> None:
        earlier, keeps = getattr(layer, products.SCALES, None), keeps_fp4()
        scales = _scales_of(method, layer, most_tokens()) if keeps and _is_kept(method, layer) else None
        if earlier is not None and scales is None:
            raise ValueError("dsa: sglang: FP4 experts that were loaded again must be ones that dsa serves")
        if scales is None:
            if keeps and wants_up_first:
                _swap_halves(layer.w13_weight, layer.w13_weight_scale_inv)
            original(method, layer)
        elif earlier is None:
            setattr(layer, products.SCALES, scales)
        else:
            for old, new in zip(earlier, scales, strict=True):
                old.copy_(new)

    return hook


def _is_kept(method: Any, layer: Any) -> bool:
    return (
        is_served(method.runner.config)
        and method.runner.config.params_dtype == torch.bfloat16
        and type(layer.dispatcher).__name__ == "StandardDispatcher"
        and layer.moe_ep_size == 1
        and 2 * layer.w13_weight.shape[2] == layer.hidden_size == layer.hidden_size_unpadded
        and getattr(layer, "w13_weight_bias", None) is None
        and hasattr(type(method).apply, "__wrapped__")  # SGLang has also installed the hook of `apply`
    )


def _scales_of(method: Any, layer: Any, most_tokens: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the block scales of a layer's weights. Return None if dsa's GEMMs do not accept the scales, which is
    logged, or are not compiled, or if memory is lacking."""
    weights = (layer.w13_weight, layer.w13_weight_scale_inv), (layer.w2_weight, layer.w2_weight_scale_inv)
    try:
        scales = tuple(products.fp4_block_scales(*pair) for pair in weights)
    except torch.OutOfMemoryError:
        return None
    except ValueError as error:
        _logger.warning("dsa: sglang: %s; experts of a layer stay the engine's own", " ".join(str(error).split()))
        return None
    pairs, config = products.fp4_layer_weights(layer, "scale_inv", scales), method.runner.config
    ready = products.experts_are_compiled("sglang", *pairs, config.top_k, config.swiglu_limit, most_tokens)
    return scales if ready else None


def _swap_halves(*tensors: torch.Tensor) -> None:
    """Swap the first and second half of the rows of each expert, in place."""
    for tensor in tensors:
        for expert in tensor.data.view(torch.uint8):
            expert.copy_(torch.cat(expert.chunk(2)[::-1]))


def apply(weights_of: Callable[[Any, Any], Weights | None], result: Hook, most_tokens: Callable[[], int]) -> Hook:
    """Return the hook of `apply` of SGLang's MoE methods: per token, the weighted sum over its experts on this GPU.

    weights_of   returns the weights of a (method, layer), or None if dsa does not serve the layer
    result       SGLang's class for the result of `apply`
    most_tokens  returns the largest number of tokens per batch
    """

    def hook(original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
        weights = weights_of(method, layer)
        if weights is None or not _is_standard(dispatch_output):
            return original(method, layer, dispatch_output)
        config = method.runner.config
        if not products.experts_are_compiled("sglang", *weights, config.top_k, config.swiglu_limit, most_tokens()):
            return original(method, layer, dispatch_output)
        chosen = dispatch_output.topk_output
        if hasattr(chosen, "to_standard"):
            chosen = chosen.to_standard()
        is_scaled = layer.should_fuse_routed_scaling_factor_in_topk  # the weights of SGLang's top-k
        factor = 1.0 if is_scaled else config.routed_scaling_factor or 1.0
        routing = chosen.topk_weights.float() * factor
        x, is_fp4 = dispatch_output.hidden_states, len(weights[0]) == 3
        return result(products.routed_experts(x, chosen.topk_ids, routing, *weights, config.swiglu_limit, is_fp4))

    return hook


def _is_standard(dispatch_output: Any) -> bool:
    """Return whether tokens are bf16 and were not sent to other GPUs. `fp4_setup` serves only layers for which that
    holds."""
    return (
        type(dispatch_output).__name__ == "StandardDispatchOutput"
        and dispatch_output.hidden_states.dtype == torch.bfloat16
        and (hasattr(dispatch_output.topk_output, "topk_ids") or hasattr(dispatch_output.topk_output, "to_standard"))
    )
