"""Linear layers that read the same input, multiplied as one."""

from collections.abc import Sequence

import torch
from torch import nn

import dsa
from dsa_layers.batch.rows import Rows
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear, FP32Linear, Linear, linear_fp32

Layer = Linear | BlockFP8Linear
Cast = tuple[torch.Tensor, torch.Tensor]  # q e4m3 [..., I] and scales fp32 [..., I / 128], as `BlockFP8Linear.cast` has


def multiply(x: torch.Tensor, *layers: Layer, cast: Cast | None = None) -> tuple[torch.Tensor, ...]:
    """y_i = x W_i^T. x [..., I] -> y_i [..., O_i], which may be views of one tensor. cast: of x, by the layers' way of
    scaling it, where the caller has it.

    Block-scaled FP8 layers with one way of scaling x share a cast of it. Where the weights of such layers, or of
    `FP32Linear`s of which the last one alone may have a scale, lie side by side (`join`), passes without gradients have
    one product with all columns. The numbers of FP8 layers are those of the layers by themselves, bit for bit; those of
    `FP32Linear`s may be summed in another order. Layers of other kinds, of several kinds, subclasses and layers with
    hooks are called.
    """
    if not _are_alike(layers):
        return tuple(layer(x) for layer in layers)
    whole = _whole_for_inference(layers)
    if isinstance(layers[0], FP32Linear):
        if whole is None:
            return tuple(layer(x) for layer in layers)
        *_, last = layers
        y = linear_fp32(x, *whole, last.scale, scaled_from=len(whole[0]) - len(last.weight))
    else:
        activations = layers[0].cast(x) if cast is None else cast
        if whole is None:
            return tuple(layer.multiply(activations, x.dtype) for layer in layers)
        y = dsa.fp8_gemm_nt(activations, whole, x.dtype)
    return y.split([len(layer.weight) for layer in layers], -1)


def multiply_as_one(x: torch.Tensor, *layers: Layer) -> tuple[torch.Tensor, ...] | None:
    """`multiply` where it has one product with all columns, else None: for a caller who has other ways then."""
    if not layers or not _are_alike(layers) or _whole_for_inference(layers) is None:
        return None
    return multiply(x, *layers)


def multiply_gathered(x: torch.Tensor, layer: Layer, cast: Cast | None, rows: Rows) -> torch.Tensor:
    """y [T, O] of all rows, x and its cast being this process's own: what the layer reads is gathered."""
    if cast is None:
        (x,) = rows.gather(x)
        return layer(x)
    return layer.multiply(rows.gather(*cast), x.dtype)


def joint_layers(module: nn.Module) -> tuple[Layer, ...]:
    """The layers that a module names as those that read its input as one product; () of a module that names none."""
    return module.joint_layers() if hasattr(module, "joint_layers") else ()


def joint_fp32_layers(module: nn.Module) -> tuple[FP32Linear, ...]:
    """The same of layers with fp32 results that several of a module's parts have."""
    return module.joint_fp32_layers() if hasattr(module, "joint_fp32_layers") else ()


def scaling(layers: Sequence[Layer]) -> bool | None:
    """`use_ue8m0` of FP8 layers that share a cast of what they read; None of other layers, and of none."""
    return layers[0].use_ue8m0 if layers and type(layers[0]) is BlockFP8Linear and _are_alike(layers) else None


def join(model: nn.Module) -> None:
    """Lays the weights side by side that modules of the model name in `joint_layers()` and `joint_fp32_layers()`: the
    layers' parameters become views of one tensor. Nothing else about them changes. What moves or copies them apart, as
    `.to()` does, is no error: products are then one after another. To be called once weights are loaded, and before a
    CUDA graph has their addresses."""
    # A module is before its parts, whose layers may be some of its own.
    for layers in (of(module) for module in model.modules() for of in (joint_layers, joint_fp32_layers)):
        join_layers(layers)


@torch.no_grad()
def join_layers(layers: Sequence[Layer]) -> None:
    """The same of these layers alone, if they can be joined and are not yet."""
    if len(layers) > 1 and _are_alike(layers) and _blocks_fit(layers) and _whole(layers) is None:
        for parameters in _parameters(layers):
            parts = torch.cat(parameters).split([len(parameter) for parameter in parameters])
            for parameter, part in zip(parameters, parts):
                parameter.data = part


def _are_alike(layers: Sequence[Layer]) -> bool:
    """Whether they are of one kind that can be joined, and a product is all that a call of each does."""
    first = layers[0]
    if any(type(layer) is not type(first) or layer._forward_hooks or layer._forward_pre_hooks for layer in layers):
        return False
    if type(first) is BlockFP8Linear:
        return all(layer.use_ue8m0 == first.use_ue8m0 for layer in layers)
    if type(first) is not FP32Linear or any(layer.scale != 1 for layer in layers[:-1]):
        return False
    return all(layer.weight.dtype == first.weight.dtype for layer in layers)


def _blocks_fit(layers: Sequence[Layer]) -> bool:
    """Whether no block of FP8 weights would lie across two layers."""
    return not isinstance(layers[0], BlockFP8Linear) or all(len(layer.weight) % BLOCK == 0 for layer in layers[:-1])


def _parameters(layers: Sequence[Layer]) -> list[list[torch.Tensor]]:
    """All weights and, of FP8 layers, all scales."""
    names = ("weight", "weight_scale_inv") if isinstance(layers[0], BlockFP8Linear) else ("weight",)
    return [[getattr(layer, name) for layer in layers] for name in names]


def _whole_for_inference(layers: Sequence[Layer]) -> tuple[torch.Tensor, ...] | None:
    """`_whole` in passes without gradients, and not under torch.compile, which does not trace the question."""
    return None if torch.is_grad_enabled() or torch.compiler.is_compiling() else _whole(layers)


def _whole(layers: Sequence[Layer]) -> tuple[torch.Tensor, ...] | None:
    """The one weight and, of FP8 layers, the one scale that the layers' parameters are parts of, if that is so."""
    whole = tuple(map(_side_by_side, _parameters(layers))) if _blocks_fit(layers) else (None,)
    return None if any(part is None for part in whole) else whole


def _side_by_side(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One tensor of all rows, if each part begins where the one before ends."""
    first = parts[0]
    width, memory, end = first.shape[1], first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        if part.shape[1] != width or not part.is_contiguous() or part.storage_offset() != end:
            return None
        if part.untyped_storage().data_ptr() != memory:
            return None
        end += part.numel()
    rows = sum(len(part) for part in parts)
    return first.detach().as_strided((rows, width), (width, 1), first.storage_offset())
