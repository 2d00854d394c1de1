"""Modules in plain form become those of the engine, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import nn

from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.joint_linear import join
from dsa_layers.layers.own_part import follow_layer

FUSED: dict[type[nn.Module], type[nn.Module]] = {DSAAttention: PagedAttention}

Module = TypeVar("Module", bound=nn.Module)


def fuse(module: Module) -> Module:
    """Prepares a model or a layer for inference, in place, and returns it.

    Layers get other classes with the same parameters and submodules. Their passes take a cache and are faster.
    Parameters take no gradient from then on, and weights that read the same input lie in one tensor. Subclasses of the
    layers stay as they are. Call it once the weights are on their device and before a CUDA graph is captured.
    `load_model` has called it, unless the model is trainable.
    """
    for part in module.modules():
        if type(part) in FUSED:
            part.__class__ = FUSED[type(part)]
            follow_layer(part)
    module.requires_grad_(False)
    if not any(parameter.is_meta for parameter in module.parameters()):
        join(module)
    return module


@contextmanager
def fused(module: Module) -> Iterator[Module]:
    """`fuse` for the time of a `with`: a model that is being trained generates text in it."""
    classes = [(part, type(part)) for part in module.modules() if type(part) in FUSED]
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        yield fuse(module)
    finally:
        for part, kind in classes:
            part.__class__ = kind
        for parameter in learning:
            parameter.requires_grad_(True)
