"""What the classes of all families have in common."""

from typing import Any, ClassVar

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

import dsa
from dsa.runtime.checks import FLOATS
from dsa_layers.hf.lengths import NOT_OURS, TokenLengths, lengths_mask

IMPLEMENTATION = "dsa"  # the name of what our layers take for a mask, and of nothing else


def _no_attention_function(*arguments: Any, **options: Any) -> None:
    raise ValueError(NOT_OURS)


AttentionInterface.register(IMPLEMENTATION, _no_attention_function)
AttentionMaskInterface.register(IMPLEMENTATION, lengths_mask)


class InPlaceOf:
    """A class that takes the place of transformers' class `original`, whose attributes and parameters it has."""

    original: ClassVar[type[nn.Module]]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        # transformers' constructor, and not that of our layer, which would have other names.
        vars(self).update(vars(self.original(*arguments, **options)))


class RMSNormInPlace(InPlaceOf):
    """transformers' RMSNorm, rounded once, in one kernel on a GPU."""

    @property
    def eps(self) -> float:
        return self.variance_epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return dsa.rms_norm(hidden_states, self.weight.float(), self.eps)


class HeadWeightsInPlace:
    """An indexer whose heads' weights are what its `weights_proj` computes, whatever stands in that one's place."""

    def head_weights(self, x: torch.Tensor) -> torch.Tensor:
        """w fp32 [T, n_heads]."""
        linear = self.weights_proj
        if computes_product_alone(linear):
            return super().head_weights(x)
        # transformers keeps this weight in fp32 in models of other dtypes, and gives x in the weight's dtype.
        weight = getattr(linear, "weight", None)
        x = x.to(weight.dtype) if weight is not None and weight.dtype in FLOATS else x
        return linear(x).float() * (self.n_heads**-0.5 * self.head_dim**-0.5)


class AttentionInPlace(InPlaceOf):
    """An attention layer that gets lengths where transformers' would get a mask."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.takes_lengths()

    def takes_lengths(self) -> None:
        """The model, whose configuration this is, makes no masks from now on."""
        self.config._attn_implementation = IMPLEMENTATION

    def in_autocast(self, x: torch.Tensor) -> torch.Tensor:
        """x in the dtype that projections give, which autocast may have chosen."""
        kind = x.device.type
        return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x

    def asks_for_gradients(self, x: torch.Tensor) -> bool:
        if not torch.is_grad_enabled():
            return False
        return x.requires_grad or any(parameter.requires_grad for parameter in self.parameters())

    @property
    def read_directly(self) -> tuple[torch.Tensor, ...]:
        """The parameters that are read without a call of the module that has them."""
        raise NotImplementedError

    def check(self, attention_mask: Any, position_ids: torch.Tensor | None, options: dict[str, Any]) -> None:
        """Raises ValueError for what these layers do not take, by the argument's name."""
        # A hook that has offloaded weights in memory during a call of their module does not help these.
        if any(parameter.is_meta for parameter in self.read_directly):
            raise ValueError(
                "device_map: weights that are offloaded to the CPU or a disk are not served; accepted: a device_map "
                f"whose devices hold all weights of attention, got none of layer {self.layer_idx} in memory"
            )
        if not isinstance(attention_mask, TokenLengths):
            got = list(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else attention_mask
            raise ValueError(
                "attention_mask: must be [batch, tokens], 0 for padding, or None, and the model's attn_implementation "
                f"{IMPLEMENTATION!r}; got {got} with {self.config._attn_implementation!r}"
            )
        if position_ids is None:
            raise ValueError("position_ids: must be [batch or 1, tokens], got None")
        if self.training and self.attention_dropout:
            raise ValueError(f"attention_dropout: must be 0 in training, got {self.attention_dropout}")
        if options.get("output_attentions") or self.config.output_attentions:
            raise ValueError("output_attentions: must be False; weights of attention are never made, got True")


def computes_product_alone(linear: nn.Module) -> bool:
    """Whether y = x W^T with the layer's weight is all that a call of it does: no adapter, other form of the weight,
    hook or offloading."""
    hooks = linear._forward_hooks or linear._forward_pre_hooks
    return type(linear) is nn.Linear and not hooks and not linear.weight.is_meta


def weight_of(linear: nn.Module, in_features: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """W [O, I] of a layer y = x W^T, in `dtype`."""
    if computes_product_alone(linear):
        return linear.weight.to(dtype)
    # Quantised, offloaded and adapted layers have their weight in many ways; what they compute, they all say.
    return linear(torch.eye(in_features, dtype=dtype, device=device)).T
