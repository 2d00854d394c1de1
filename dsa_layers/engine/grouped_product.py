"""A `GroupedLinear` and the projection after it. With FP8 weights, each cast writes the layout of the next product."""

import torch
from torch import nn

import dsa
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.engine.joint_linear import Cast
from dsa_layers.layers.grouped_linear import GroupedLinear
from dsa_layers.layers.linear import BlockFP8Linear


def grouped_products(x: torch.Tensor, grouped: GroupedLinear, then: nn.Module, batch: TokenBatch) -> torch.Tensor:
    """Return then(grouped(x)), [T, outputs of `then`]. x: [T, groups, I]."""
    layer = grouped.matrices
    if not isinstance(layer, BlockFP8Linear):
        return then(grouped(x).flatten(1))
    rows = batch.group_rows(grouped.groups, len(x))
    activations = dsa.scatter_cast_to_fp8(x.flatten(0, 1), rows.to_groups, layer.use_ue8m0)
    return grouped_products_of_cast(activations, grouped, then, batch, x.dtype)


def grouped_products_of_cast(
    activations: Cast, grouped: GroupedLinear, then: nn.Module, batch: TokenBatch, dtype: torch.dtype
) -> torch.Tensor:
    """Return `grouped_products` in `dtype` for an x that is already in FP8.

    activations: x in FP8 [groups * T, I] with scales; the rows of a group are adjacent.
    """
    layer, groups = grouped.matrices, grouped.groups
    tokens = len(activations[0]) // groups
    rows = batch.group_rows(groups, tokens)
    matrices = tuple(t.unflatten(0, (groups, -1)) for t in (layer.weight, layer.weight_scale_inv))
    y = dsa.grouped_fp8_gemm_nt(activations, matrices, rows.ends, dtype)
    if not isinstance(then, BlockFP8Linear):
        return then(y.unflatten(0, (groups, tokens)).transpose(0, 1).flatten(1))
    activations = dsa.scatter_cast_to_fp8(y, rows.to_tokens, then.use_ue8m0)
    return then.multiply(tuple(part.view(tokens, groups * part.shape[1]) for part in activations), dtype)
