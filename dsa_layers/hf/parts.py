"""Base classes of the layers that replace transformers' layers. A replacement has the attributes of transformers'
layer. `alias` makes an attribute available under the name that dsa's layers read."""

from typing import Any, ClassVar

import torch
from transformers import AttentionMaskInterface

import dsa
from dsa.runtime.checks import FLOATS
from dsa_layers.batch.selected import Selected
from dsa_layers.hf.lengths import TokenLengths
from dsa_layers.hf.paged_layer import layer_of
from dsa_layers.layers.linear import computes_product_alone

IMPLEMENTATION = "dsa"  # the attn_implementation for which transformers creates `TokenLengths` as masks

AttentionMaskInterface.register(IMPLEMENTATION, TokenLengths)


def alias(name: str) -> property:
    """Return a property that reads the attribute `name`."""
    return property(lambda self: getattr(self, name))


class RMSNormInPlace:
    """Base class of norms. It computes transformers' RMSNorm with `dsa.rms_norm`, which rounds the result once."""

    eps = alias("variance_epsilon")

    @property
    def gain(self) -> torch.Tensor:
        return self.weight.float()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return dsa.rms_norm(hidden_states, self.gain, self.eps)


class HeadWeightsInPlace:
    """Base class of indexers. If `weights_proj` does more than multiply by its weight (adapters, hooks), `head_weights`
    calls this module instead of reading the weight."""

    def head_weights(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weights of the indexer's heads, fp32 [T, n_heads]."""
        linear = self.weights_proj
        if computes_product_alone(linear):
            return super().head_weights(x)
        # transformers may keep this weight in fp32 in models of other dtypes.
        weight = getattr(linear, "weight", None)
        x = x.to(weight.dtype) if weight is not None and weight.dtype in FLOATS else x
        return linear(x).float() * self.weight_scale


class AttentionInPlace:
    """Base class of attention layers. The mask is a `TokenLengths`, and attention is computed on packed tokens.

    A subclass defines two methods. `_storage(x)` describes the tensors of the layer's cache. `attend_packed(x, rope,
    tokens, layer, selected)` computes the attention of packed tokens x [T, D], whose `Pass` is `tokens`, and returns
    the output and the selected keys or None. `rope` is `position_embeddings`, `layer` is None if nothing is cached, and
    `selected` is `prev_topk_indices` if the layer has no indexer, else None. Gradients are enabled in `attend_packed`
    if the caller enables them and x or a parameter of the layer requires them.
    """

    consecutive: ClassVar[bool] = False  # whether the positions of a sequence's tokens must be consecutive
    returns_selected: ClassVar[bool] = False  # whether `forward` also returns the selected keys, for later layers

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: TokenLengths,
        position_ids: torch.Tensor,
        cache: Any = None,
        prev_topk_indices: Selected | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None] | tuple[torch.Tensor, None, Selected]:
        """Return the output [B, S, hidden], None and, if `returns_selected`, the selected keys, as a `Selected`
        instead of transformers' top-k indices."""
        self._check(attention_mask, options)
        device, lengths = hidden_states.device.type, attention_mask
        if torch.is_autocast_enabled(device):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(device))
        gradients = torch.is_grad_enabled() and (
            hidden_states.requires_grad or any(parameter.requires_grad for parameter in self.parameters())
        )
        layer = None
        if cache is not None:
            layer = layer_of(cache, self.layer_idx, self._storage(hidden_states), hidden_states)
            if gradients:
                layer = layer.leave_out(lengths.new)
            else:
                layer.reserve(lengths.counts(layer))
        tokens = lengths.packed(
            position_ids.to(hidden_states.device), layer, consecutive=self.consecutive, separate=cache is None
        )
        if tokens is None:
            y, selected = torch.zeros_like(hidden_states), Selected(None, None)
        else:
            x, selected = tokens.pack(hidden_states), prev_topk_indices if self.indexer is None else None
            with torch.set_grad_enabled(gradients):
                y, selected = self.attend_packed(x, position_embeddings, tokens, layer, selected)
            y = tokens.unpack(y)
        if layer is not None:
            layer.advance(lengths.counts(layer), lengths.new)
        return (y, None, selected) if self.returns_selected else (y, None)

    def _check(self, attention_mask: Any, options: dict[str, Any]) -> None:
        """Raise ValueError for an argument or setting that this layer does not support. The message names it."""
        if next(self.parameters()).is_meta:
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
        if self.training and self.attention_dropout:
            raise ValueError(f"attention_dropout: must be 0 in training, got {self.attention_dropout}")
        if options.get("output_attentions") or self.config.output_attentions:
            raise ValueError("output_attentions: must be False; weights of attention are never made, got True")
