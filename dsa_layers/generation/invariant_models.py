"""Of which models decoding passes can be batch-invariant (`dsa_layers/engine/batch_invariance.py`)."""

import torch
from torch import nn

from dsa.runtime import backends
from dsa_layers.engine.fp8_up_projection import can_stay_stored
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.models.protocols import Model


def check_invariant(model: Model) -> None:
    """Raises ValueError for a model whose passes would depend on how many tokens they have: not on GPUs with kernels,
    or not with FP8 weights and activations in bfloat16. Several GPUs add their parts in the order of the ranks,
    whichever way the parts take (`Ranks.sum`), and in decoding each has all rows (`rows_of`)."""
    weight = next(model.parameters())
    if not backends.runs_kernel("linear_fp32", weight):
        where = "the references" if weight.is_cuda else f"a model on {weight.device}"
        raise ValueError(f"batch_invariant: takes a model on a GPU that runs the kernels, got {where}")
    precision = getattr(model, "precision", None)
    if precision is None or not precision.fp8_linear or not precision.fp8_indexer or precision.dtype != torch.bfloat16:
        got = f"a {type(model).__name__} without a precision"
        if precision is not None:
            kinds = ("FP8" if fp8 else "other" for fp8 in (precision.fp8_linear, precision.fp8_indexer))
            got = "{} weights, {} indexers and {}".format(*kinds, precision.dtype)
        raise ValueError(f"batch_invariant: takes a model with FP8 weights, FP8 indexers and torch.bfloat16, got {got}")
    for name, layer in model.named_modules() if isinstance(model, nn.Module) else ():
        if layer._compiled_call_impl is not None:
            raise ValueError(f"batch_invariant: takes a model that is not compiled, got {name or 'one that is'}")
        if isinstance(layer, DSAAttention) and not can_stay_stored(layer):
            sizes = f"nope_dim={layer.nope_dim}, rope_dim={layer.rope_dim}, v_dim={layer.v_dim}"
            raise ValueError(
                f"batch_invariant: takes attention whose kv_b kernels read as it is stored (128 or 192 nope_dim, 64 "
                f"rope_dim, 512 kv_lora_rank, a multiple of 128 v_dim), got {sizes}, "
                f"kv_lora_rank={layer.kv_lora_rank} in {name}"
            )
