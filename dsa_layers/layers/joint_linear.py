"""Linear layers that read the same input, multiplied as one."""

from collections.abc import Sequence

import torch
from torch import nn

import dsa
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear, Linear

Layer = Linear | BlockFP8Linear
Cast = tuple[torch.Tensor, torch.Tensor]  # q e4m3 [..., I] and scales fp32 [..., I / 128], as `BlockFP8Linear.cast` has


def multiply(x: torch.Tensor, *layers: Layer, cast: Cast | None = None) -> tuple[torch.Tensor, ...]:
    """y_i = x W_i^T. x [..., I] -> y_i [..., O_i], which may be views of one tensor. cast: of x, by the layers' way of
    scaling it, where the caller has it.

    Block-scaled FP8 layers with one way of scaling x share a cast of it; and where their weights lie side by side
    (`join`), passes without gradients have one product with all columns. The numbers are those of the layers by
    themselves, bit for bit. Layers of other kinds, subclasses and layers with hooks are called.
    """
    if scaling(layers) is None:
        return tuple(layer(x) for layer in layers)
    activations = layers[0].cast(x) if cast is None else cast
    whole = None if torch.is_grad_enabled() or torch.compiler.is_compiling() else _whole(layers)
    if whole is None:
        return tuple(layer.multiply(activations, x.dtype) for layer in layers)
    y = dsa.fp8_gemm_nt(activations, whole, x.dtype)
    return y.split([len(layer.weight) for layer in layers], -1)


def joint_layers(module: nn.Module) -> tuple[Layer, ...]:
    """The layers that a module names as those that read its input as one product; () of a module that names none."""
    return module.joint_layers() if hasattr(module, "joint_layers") else ()


def scaling(layers: Sequence[Layer]) -> bool | None:
    """`use_ue8m0` of layers that share a cast of what they read; None if they do not, or there are none."""
    ways = {layer.use_ue8m0 if _is_plain(layer) else None for layer in layers}
    return ways.pop() if len(ways) == 1 else None


@torch.no_grad()
def join(model: nn.Module) -> None:
    """Lays the weights side by side that modules of the model name in `joint_layers()`: the layers' parameters become
    views of one tensor. Nothing else about them changes. What moves or copies them apart, as `.to()` does, is no
    error: products are then one after another. To be called once weights are loaded, and before a CUDA graph has their
    addresses."""
    for module in model.modules():
        layers = joint_layers(module)
        if len(layers) > 1 and all(_is_plain(layer) for layer in layers) and _whole(layers) is None:
            if all(len(layer.weight) % BLOCK == 0 for layer in layers[:-1]):
                for parameters in _parameters(layers):
                    parts = torch.cat(parameters).split([len(parameter) for parameter in parameters])
                    for parameter, part in zip(parameters, parts):
                        parameter.data = part


def _is_plain(layer: Layer) -> bool:
    """Whether its product is all that a call of it does."""
    return type(layer) is BlockFP8Linear and not layer._forward_hooks and not layer._forward_pre_hooks


def _parameters(layers: Sequence[BlockFP8Linear]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All weights, all scales."""
    return [layer.weight for layer in layers], [layer.weight_scale_inv for layer in layers]


def _whole(layers: Sequence[BlockFP8Linear]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The one weight and the one scale that the layers' parameters are parts of, if that is so."""
    if any(len(layer.weight) % BLOCK for layer in layers[:-1]):
        return None
    weight, scale = (_side_by_side(parameters) for parameters in _parameters(layers))
    return None if weight is None or scale is None else (weight, scale)


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
