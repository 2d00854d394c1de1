"""A rank's part of a replicated layer: its heads of attention, its channels of a shared expert."""

import copy

import torch
from torch import nn

from dsa_layers.engine.joint_linear import join_layers
from dsa_layers.engine.split import plan_of
from dsa_layers.layers.linear import BlockFP8Linear


def make_parts(model: nn.Module) -> None:
    """Give every replicated layer its `part`. Call it after the weights are loaded and on their device, and before a
    CUDA graph is captured; call it again after they are loaded or moved again."""
    for layer in model.modules():
        ranks = getattr(layer, "part_of_ranks", None)
        if ranks is not None:
            # Not as a submodule, whose parameters the model would have twice.
            vars(layer)["part"] = rank_part(layer, ranks.rank, ranks.size)


@torch.inference_mode(False)
@torch.no_grad()
def rank_part(layer: nn.Module, rank: int, size: int) -> nn.Module:
    """The layer with one rank's part of the parameters. It computes a partial sum.

    The parameters are views of the layer's, except those of FP8 layers that lie side by side for one product.
    """
    part, plan = copy.copy(layer), plan_of(layer)
    part._modules, part._parameters = dict(layer._modules), dict(layer._parameters)
    for name, count in {name: getattr(layer, name) for name in plan.counts}.items():
        setattr(part, name, count // size)
    for dim, names in enumerate((plan.dim0, plan.dim1)):
        for name in names:
            if name in layer._modules:
                part._modules[name] = _cut_module(layer._modules[name], dim, rank, size)
            else:
                part._parameters[name] = _cut(layer._parameters[name], dim, rank, size)
    join_layers(part.joint_layers())
    return part


def copied(part: nn.Module) -> list[torch.Tensor]:
    """The parameters of a part that are no views of the layer's, given that a part of the joint layers is cut."""
    layers = [layer for layer in part.joint_layers() if type(layer) is BlockFP8Linear and layer.part_of is not None]
    return [parameter for layer in layers for parameter in layer._parameters.values()]


def _cut_module(module: nn.Module, dim: int, rank: int, size: int) -> nn.Module:
    part = copy.copy(module)
    part._modules = {name: _cut_module(child, dim, rank, size) for name, child in module._modules.items()}
    parameters = module._parameters.items()
    part._parameters = {name: None if x is None else _cut(x, dim, rank, size) for name, x in parameters}
    if isinstance(module, BlockFP8Linear) and dim == 0:
        rows = len(module.weight) // size
        part.part_of, part._dequantised = (module, slice(rank * rows, (rank + 1) * rows)), None
    return part


def _cut(x: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    length = x.shape[dim] // size
    return x.detach().narrow(dim, rank * length, length)
