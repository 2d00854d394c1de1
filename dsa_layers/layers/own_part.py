"""A process's part of a layer of which it has all: its heads of attention, its channels of a shared expert."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from dsa_layers.layers.grouped_linear import GroupedLinear
from dsa_layers.layers.joint_linear import join_layers, joint_layers
from dsa_layers.layers.linear import BlockFP8Linear, Linear

ACCEPTED = Linear, BlockFP8Linear, GroupedLinear
Tensors = dict[str, torch.Tensor]


class _Parts(NamedTuple):
    """Of a layer, by name. copies: of `copied`, rows of FP8 weights. These are held, too: memory that is held is no
    other tensor's, so addresses say which were copied."""

    modules: dict[str, nn.Module]
    parameters: Tensors
    copied: list[torch.Tensor]
    copies: list[torch.Tensor]

    def copy_uncounted(self) -> None:
        """Again what parameters of inference mode hold, whose changes are not counted."""
        for of_layer, own in zip(self.copied, self.copies):
            if of_layer.is_inference():
                own.copy_(of_layer)


class OwnPart:
    """That of process `number` of `processes`.

    The layer's `shares` say what of it is split. Parts of its parameters lie in the same memory, rows and columns, but
    for rows of FP8 weights that lie side by side for one product (`joint_layers`), and of their scales: these are
    copied (`copies`), as their parts are to lie side by side, too. What was made is kept until the layer's modules or
    parameters are others. The copies are then made again, in the same memory where that is possible, so that a CUDA
    graph captured earlier reads the new ones: with the next use, or by `update`, which `load_state_dict` of the layer
    or the model calls, and `.to()`. After a change that PyTorch does not count, through `.data` or from outside, call
    `update`, or `copy_own_parts` of the model.
    """

    def __init__(self, number: int, processes: int) -> None:
        self._number, self.processes = number, processes
        self._state: tuple | None = None
        self._parts = _Parts({}, {}, [], [])

    def __reduce__(self) -> tuple[type["OwnPart"], tuple[int, int]]:
        return type(self), (self._number, self.processes)  # a copy's layer is another one

    def of(self, layer: nn.Module) -> nn.Module:
        """The same layer with this part alone, for inference: what it gives is a part of a sum.

        ValueError if what is split is not a `Linear`, `BlockFP8Linear` or `GroupedLinear`, whose parts compute parts of
        what they compute, but a subclass, an adapter, or a module with a `forward` of its own; and if they are asked
        for gradients, which would not reach the layer's parameters."""
        _check(layer)
        state, parts = _state(layer), self._parts
        if state != self._state:
            # What a graph being captured copies is there only when it is replayed: it makes its own, each time.
            captured = next(layer.parameters()).is_cuda and torch.cuda.is_current_stream_capturing()
            parts = self._make(layer, iter(())) if captured else self.update(layer)
        else:
            parts.copy_uncounted()
        counts = {name: self.share(vars(layer)[name]) for name in layer.shares.counts}
        modules, parameters = layer._modules | parts.modules, layer._parameters | parts.parameters
        part = object.__new__(type(layer))  # in every pass: `copy.copy` takes several times as long
        vars(part).update(vars(layer), _modules=modules, _parameters=parameters, own_part=None, **counts)
        return part

    def share(self, count: int) -> int:
        """How many of so many are this process's."""
        return count // self.processes

    def copies(self, layer: nn.Module) -> list[torch.Tensor]:
        """What of this part does not lie in the layer's memory."""
        return self.update(layer).copies

    def update(self, layer: nn.Module) -> _Parts:
        """Makes it that of the layer as it is now; drops it if that has modules that `of` refuses."""
        if not all(_is_accepted(module) for _, module in _modules(layer)):
            self._parts, self._state = _Parts({}, {}, [], []), None
            return self._parts
        self._parts, self._state = self._make(layer, iter(self._parts.copies)), _state(layer)
        return self._parts

    @torch.inference_mode(False)
    @torch.no_grad()
    def _make(self, layer: nn.Module, held: Iterator[torch.Tensor]) -> _Parts:
        """held: memory of earlier copies, in their order."""
        parts, joint = _Parts({}, {}, [], []), []
        for name, dim in _places(layer):
            if name not in layer._modules:
                parts.parameters[name] = self._part(layer._parameters[name], dim)
                continue
            module = layer._modules[name]
            is_joint = any(module is one for one in joint_layers(layer))
            part = parts.modules[name] = self._of_module(module, dim, parts, held, copied=is_joint)
            joint += [part] if is_joint else []
        join_layers(joint)
        return parts

    def _of_module(
        self, module: nn.Module, dim: int, parts: _Parts, held: Iterator[torch.Tensor], copied: bool
    ) -> nn.Module:
        part = copy.copy(module)
        children = module._modules.items()
        part._modules = {name: self._of_module(child, dim, parts, held, copied) for name, child in children}
        part._parameters = {name: self._part(x, dim) for name, x in module._parameters.items()}
        if not isinstance(module, BlockFP8Linear):
            return part
        if dim == 0:
            size = self.share(len(module.weight))
            part.part_of, part._dequantised = (module, slice(self._number * size, (self._number + 1) * size)), None
        if copied:
            parts.copied.extend(part._parameters.values())
            part._parameters = {name: _copy(x, next(held, None)) for name, x in part._parameters.items()}
            parts.copies.extend(part._parameters.values())
        return part

    def _part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        size = self.share(x.shape[dim])
        return x.detach().narrow(dim, self._number * size, size)


class SplitByTokens(nn.Module):
    """A layer of which a process may have all, for its own tokens of long passes, and in other passes uses its part
    alone: `own_part`, None where that is not so. This follows what the layer loads and where it goes, and holds no
    memory that it has left.
    """

    own_part: OwnPart | None = None

    def part(self) -> Self:
        """What a process uses where the tokens are not split: its part, and the layer itself where that is one."""
        return self if self.own_part is None else self.own_part.of(self)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        moved = super()._apply(fn, recurse)
        _update(self)
        return moved


def follow_layer(layer: nn.Module) -> None:
    """Makes the part of a layer that is `SplitByTokens` follow what the layer loads, with its submodules."""
    if isinstance(layer, SplitByTokens) and _update not in layer._load_state_dict_post_hooks.values():
        layer.register_load_state_dict_post_hook(_update)


def _update(layer: SplitByTokens, *_: Any) -> None:
    if layer.own_part is not None:
        layer.own_part.update(layer)


def _copy(x: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
    """A contiguous copy of x: in `held`, if that is like it."""
    if held is None or (held.shape, held.dtype, held.device) != (x.shape, x.dtype, x.device):
        return x.clone(memory_format=torch.contiguous_format)
    return held.copy_(x)


def _places(layer: nn.Module) -> Iterator[tuple[str, int]]:
    """(name, dimension that is split) of a layer's modules and parameters."""
    for dim, names in enumerate((layer.shares.rows, layer.shares.columns)):
        for name in names:
            yield name, dim


def _modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those that are split, and theirs; with the layer's name of them."""
    for name, _ in _places(layer):
        if name in layer._modules:
            module = layer._modules[name]
            yield name, module
            for child in module._modules.values():
                yield name, child


def _parameters(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that are split; with the layer's name of them, or of the module that has them."""
    for name, _ in _places(layer):
        if name in layer._parameters:
            yield name, layer._parameters[name]
    for name, module in _modules(layer):
        for x in module._parameters.values():
            yield name, x


def _check(layer: nn.Module) -> None:
    for name, module in _modules(layer):
        if not _is_accepted(module):
            own = ", with a forward of its own" if "forward" in vars(module) else ""
            raise ValueError(
                f"{name}: short passes compute parts of {type(layer).__name__}; accepted: "
                f"{' or '.join(kind.__name__ for kind in ACCEPTED)} as they are, got {type(module).__name__}{own}"
            )
    learns = torch.is_grad_enabled() and [name for name, x in _parameters(layer) if x.requires_grad]
    if learns:
        raise ValueError(
            f"requires_grad: short passes compute parts of {type(layer).__name__}, which take no gradient; "
            f"accepted: False, or a pass under torch.no_grad(), got True of {learns[0]}"
        )


def _is_accepted(module: nn.Module) -> bool:
    return type(module) in ACCEPTED and "forward" not in vars(module)


def _state(layer: nn.Module) -> tuple:
    """What changes with the layer's modules and parameters, but for changes in place that are not counted."""
    modules = [module for _, module in _modules(layer)]
    found = [x for _, x in _parameters(layer)]
    versions = (None if x.is_inference() else x._version for x in found)
    return *modules, *((x.data_ptr(), x.shape, x.device, x.dtype) for x in found), *versions
