"""Products of several linear layers for inference. `join` places the weights of layers with the same input next to each
other in memory, so that one product can compute all these layers."""

from collections.abc import Sequence

import torch
from torch import nn

import dsa
from dsa.kernels.elementwise.limits import MAX_NORM_CAST_CHANNELS
from dsa_layers.batch.placement import Placement
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.engine.fp32_product import fp32_product
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear, FP32Linear, GroupedLinear, Linear, with_padding
from dsa_layers.layers.norm import RMSNorm

Layer = Linear | BlockFP8Linear
MOST_CHANNELS = min(MAX_NORM_CAST_CHANNELS.values())  # most that the fused norm and cast supports in every dtype
Cast = tuple[torch.Tensor, torch.Tensor]  # result of `BlockFP8Linear.cast`: e4m3 [..., I], scales fp32 [..., I / 128]


def multiply(x: torch.Tensor, *layers: nn.Module, cast: Cast | None = None) -> tuple[torch.Tensor, ...]:
    """Return y_i = x W_i^T [..., O_i] for each layer. The results may be views of one tensor.

    x     [..., I]
    cast  x in FP8 with scales for FP8 layers; None if `multiply` must compute it

    If all layers are FP8 layers with equal use_ue8m0, they share a cast of x. If their weights are adjacent (`join`),
    they also share one product, which gives the same bits as separate products. If all layers are `FP32Linear`s with
    adjacent weights of one dtype, and all but the last have scale 1, they share one product. Its bits may differ from
    those of separate products. Otherwise each layer computes a separate product.
    """
    if not _are_alike(layers):
        return tuple(layer(x) for layer in layers)
    whole = _whole(layers)
    if isinstance(layers[0], FP32Linear):
        if whole is None:
            return tuple(fp32_product(x, layer.weight, layer.scale) for layer in layers)
        *_, last = layers
        y = fp32_product(x, *whole, last.scale, scaled_from=len(whole[0]) - len(last.weight))
    else:
        activations = layers[0].cast(x) if cast is None else cast
        if whole is None:
            return tuple(layer.multiply(activations, x.dtype) for layer in layers)
        weight, scale = whole
        y = dsa.fp8_gemm_nt(activations, (weight, with_padding(scale)), x.dtype)
    return y.split([len(layer.weight) for layer in layers], -1)


def multiply_as_one(x: torch.Tensor, *layers: nn.Module) -> tuple[torch.Tensor, ...] | None:
    """Return `multiply(x, *layers)` if one product computes it, else None."""
    if not layers or not _are_alike(layers) or _whole(layers) is None:
        return None
    return multiply(x, *layers)


def multiply_gathered(x: torch.Tensor, layer: Layer, cast: Cast | None, placement: Placement) -> torch.Tensor:
    """Gather the rows of `cast`, or of x if `cast` is None, from all ranks. Return the layer's y [T, O] for all rows.

    cast: x in FP8 with scales. placement: the placement of the rows of x and `cast`.
    """
    if cast is None:
        (x,) = placement.all_gather(x)
        return layer(x)
    return layer.multiply(placement.all_gather(*cast), x.dtype)


def cast_scaling(layers: Sequence[nn.Module]) -> bool | None:
    """Return `use_ue8m0` if all layers are FP8 layers that can share a cast of their input, else None."""
    return layers[0].use_ue8m0 if layers and type(layers[0]) is BlockFP8Linear and _are_alike(layers) else None


def norm_and_cast(
    norm: nn.Module, x: torch.Tensor, layers: Sequence[nn.Module], residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, Cast | None]:
    """Return (h, y, cast): h = residual + x, or h = x without a residual; y = norm(h); cast = y in FP8 with scales.

    x, residual: [T, D]. layers: the layers that multiply y. If `norm_cast_scaling` returns None for these layers,
    `cast` is None. Otherwise one op computes all results. For D >= 256, it gives the same bits as separate ops.
    """
    use_ue8m0 = norm_cast_scaling(norm, x.shape[-1], layers)
    if use_ue8m0 is None:
        h = x if residual is None else residual + x
        return h, norm(h), None
    rest = norm.gain, norm.eps, use_ue8m0
    if residual is None:
        y, *cast = dsa.rms_norm_cast_to_fp8(x, *rest)
        return x, y, tuple(cast)
    h, y, *cast = dsa.add_rms_norm_cast_to_fp8(x, residual, *rest)
    return h, y, tuple(cast)


def norm_cast_scaling(norm: nn.Module, channels: int, layers: Sequence[nn.Module]) -> bool | None:
    """Return `use_ue8m0` of the cast that `layers` share if a kernel can fuse this cast with the norm, else None."""
    return cast_scaling(layers) if type(norm) is RMSNorm and channels <= MOST_CHANNELS else None


def join(model: nn.Module) -> None:
    """Place the weights of layers with the same input next to each other in memory.

    Modules return such groups of layers from the methods `joint_layers` and `joint_fp32_layers`. If `join_layers` can
    join a group, the group's weights become views of one tensor, and its FP8 scales views of another. After `.to()` the
    weights may no longer be adjacent; then each layer computes a separate product. Call `join` after the weights are
    loaded and before a CUDA graph is captured.
    """
    # A submodule may list a subset of its parent's layers. `modules` yields the parent first, so the larger group is
    # joined first.
    for module in model.modules():
        for name in ("joint_layers", "joint_fp32_layers"):
            if hasattr(module, name):
                join_layers(getattr(module, name)())


@torch.no_grad()
def join_layers(layers: Sequence[Layer]) -> None:
    """Make the weights of these layers adjacent, if one product can then compute all layers (`_are_alike`,
    `_blocks_fit`) and the weights are not adjacent yet."""
    if len(layers) > 1 and _are_alike(layers) and _blocks_fit(layers) and _whole(layers) is None:
        weights, *scales = _parameters(layers)
        for parameters, joined in ((weights, torch.cat(weights)), *((own, padded(torch.cat(own))) for own in scales)):
            for parameter, part in zip(parameters, joined.split([len(parameter) for parameter in parameters])):
                parameter.data = part


@torch.no_grad()
def pad_scales(model: nn.Module) -> None:
    """Move the FP8 scales of weights to rows that products read in place (`padded`). Call `pad_scales` after `join`,
    which pads the scales of the layers that it joins."""
    for name, parameter in model.named_parameters():
        if name.endswith("_scale_inv") and parameter.dtype == torch.float32 and not parameter.is_meta:
            parameter.data = padded(parameter.data)


def padded(scale: torch.Tensor) -> torch.Tensor:
    """Return scales [..., G] as a view of a tensor with 4 ceil(G / 4) columns, in which `with_padding` finds zeros in
    the added columns. Return `scale` itself if it is such a view already, or if no column would be added."""
    groups = scale.shape[-1]
    if groups % 4 == 0 or with_padding(scale) is not scale:
        return scale
    return nn.functional.pad(scale, (0, -groups % 4))[..., :groups]


def _are_alike(layers: Sequence[nn.Module]) -> bool:
    """Return whether all layers are FP8 layers with equal use_ue8m0, or all are `FP32Linear`s of one dtype and all but
    the last have scale 1."""
    first = layers[0]
    if any(type(layer) is not type(first) for layer in layers):
        return False
    if type(first) is BlockFP8Linear:
        return all(layer.use_ue8m0 == first.use_ue8m0 for layer in layers)
    if type(first) is not FP32Linear or any(layer.scale != 1 for layer in layers[:-1]):
        return False
    return all(layer.weight.dtype == first.weight.dtype for layer in layers)


def _blocks_fit(layers: Sequence[Layer]) -> bool:
    """Return whether every 128 x 128 block of the joined FP8 weights belongs to one layer. True for other weights."""
    return not isinstance(layers[0], BlockFP8Linear) or all(len(layer.weight) % BLOCK == 0 for layer in layers[:-1])


def _parameters(layers: Sequence[Layer]) -> list[list[torch.Tensor]]:
    """Return the list of all weights and, for FP8 layers, the list of all scales."""
    names = ("weight", "weight_scale_inv") if isinstance(layers[0], BlockFP8Linear) else ("weight",)
    return [[getattr(layer, name) for layer in layers] for name in names]


def _whole(layers: Sequence[Layer]) -> tuple[torch.Tensor, ...] | None:
    """Return the joined weight and, for FP8 layers, the joined scales. Return None if these are not adjacent in memory
    or `_blocks_fit(layers)` is false."""
    whole = tuple(map(_side_by_side, _parameters(layers))) if _blocks_fit(layers) else (None,)
    return None if any(part is None for part in whole) else whole


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one tensor with the rows of all parts if the parts are adjacent in memory, else None."""
    first = parts[0]
    strides, memory, end = first.stride(), first.untyped_storage().data_ptr(), first.storage_offset()
    if strides[1] != 1:
        return None
    for part in parts:
        if part.shape[1] != first.shape[1] or part.stride() != strides or part.storage_offset() != end:
            return None
        if part.untyped_storage().data_ptr() != memory:
            return None
        end += len(part) * strides[0]
    rows = sum(len(part) for part in parts)
    return first.detach().as_strided((rows, first.shape[1]), strides, first.storage_offset())


def grouped_products(x: torch.Tensor, grouped: GroupedLinear, then: nn.Module, batch: TokenBatch) -> torch.Tensor:
    """Return then(grouped(x).flatten(1)), [T, outputs of `then`].

    x      [T, groups, I], with I channels per group
    batch  the batch of the pass, which caches permutations of rows (`TokenBatch.group_rows`)
    """
    layer = grouped.matrices
    if not isinstance(layer, BlockFP8Linear):
        return then(grouped(x).flatten(1))
    rows = batch.group_rows(grouped.groups, len(x))
    activations = dsa.scatter_cast_to_fp8(x.flatten(0, 1), rows.to_groups, layer.use_ue8m0)
    return grouped_products_of_cast(activations, grouped, then, batch, x.dtype)


def grouped_products_of_cast(
    activations: Cast, grouped: GroupedLinear, then: nn.Module, batch: TokenBatch, dtype: torch.dtype
) -> torch.Tensor:
    """Compute `grouped_products` for an x that is already in FP8. Return the result in `dtype`.

    activations: x in FP8, [groups * T, I] with scales; the T rows of a group are adjacent.
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
