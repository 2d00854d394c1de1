"""Whether a call is like one that was recorded (`recording`), asked in one call of torch's guards.

A signature (`known_calls`) takes Python more than a microsecond a tensor, as much as a launch for five of them. The
guards that torch.compile has for its arguments compare the same in a tenth of that. What is like the recorded call here
has its signature; what is not may have it nonetheless, where it differs in what only torch's guards look at (inference
mode, autocast, parameters for tensors), and goes by its signature then.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsa.runtime.torch_shortcuts import HAS_SHORTCUTS, TensorGuards, current_device

Guard = Callable[..., bool]


def guard(arguments: tuple[Any, ...], in_place: Sequence[tuple[int, int]] = ()) -> Guard | None:
    """A function of as many arguments: whether they are like these, on the GPU that is current. None where these hold
    what it cannot compare, and with a torch whose guards are not known.

    in_place  pairs of places of arguments of which it matters whether they begin at the same address
    """
    if not HAS_SHORTCUTS:
        return None
    tensors: dict[str, torch.Tensor] = {}  # each once, as torch's guards want it
    names: dict[str, Any] = {}
    kinds, numbers = [], []  # of lists, which are asked first; of what is no tensor, or one that was there before
    for i, x in enumerate(arguments):
        items = [(f"a{i}", x)]
        if type(x) in (list, tuple):
            kinds.append(f"type(a{i}) is {type(x).__name__} and len(a{i}) == {len(x)}")
            items = [(f"a{i}[{j}]", y) for j, y in enumerate(x)]
        for name, y in items:
            if isinstance(y, torch.Tensor):
                if y.layout is not torch.strided:
                    return None
                if before := next((other for other, x in tensors.items() if x is y), None):
                    numbers.append(f"{name} is {before}")
                else:
                    tensors[name] = y
            elif (condition := _equal(name, y, names)) is None:
                return None
            else:
                numbers.append(condition)
    if not tensors:
        return None
    sizes, strides = ([list(of(x)) for x in tensors.values()] for of in (torch.Tensor.size, torch.Tensor.stride))
    names["check"] = TensorGuards(*tensors.values(), dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    conditions = [*kinds, f"check({', '.join(tensors)})", *numbers, *_addresses(tensors, arguments, in_place)]
    if any(x.requires_grad for x in tensors.values()):
        names["is_grad_enabled"] = torch.is_grad_enabled
        conditions.append(f"is_grad_enabled() is {torch.is_grad_enabled()}")
    device = next(iter(tensors.values())).device
    if device.type == "cuda":
        names["current_device"] = current_device
        conditions.append(f"current_device() == {device.index}")
    parameters = ", ".join(f"a{i}" for i in range(len(arguments)))
    exec(f"def like({parameters}):\n    return {' and '.join(conditions)}", names)
    return names["like"]


def _equal(name: str, value: Any, names: dict[str, Any]) -> str | None:
    """The condition that an argument which is no tensor is this one."""
    if value is None or type(value) is bool:
        return f"{name} is {value}"
    if type(value) is int or type(value) is str:
        return f"type({name}) is {type(value).__name__} and {name} == {value!r}"
    if type(value) is float and math.isfinite(value):
        same = f"{name} == {value!r}" if value else f"repr({name}) == '{value!r}'"  # -0.0 is not 0.0
        return f"type({name}) is float and {same}"
    if type(value) is torch.dtype:
        constant = f"dtype{len(names)}"
        names[constant] = value
        return f"{name} is {constant}"
    return None


def _addresses(
    tensors: dict[str, torch.Tensor], arguments: tuple[Any, ...], in_place: Sequence[tuple[int, int]]
) -> list[str]:
    """That all begin as far from a multiple of 16 bytes as now, and those of each pair together or not, as now."""
    rests = {name: x.data_ptr() & 15 for name, x in tensors.items()}
    aligned = " | ".join(f"{name}.data_ptr()" for name, rest in rests.items() if not rest)
    found = [f"{name}.data_ptr() & 15 == {rest}" for name, rest in rests.items() if rest]
    if aligned:
        found.append(f"not ({aligned}) & 15")
    for i, j in in_place:
        first, second = arguments[i], arguments[j]
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            same = first.data_ptr() == second.data_ptr()
            found.append(f"(a{i}.data_ptr() == a{j}.data_ptr()) is {same}")
    return found
