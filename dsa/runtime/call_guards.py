"""Find out whether a call equals a recorded one (`recorded_calls`), by one call of torch's guards.

Python needs more than a microsecond per tensor to build a signature (`recorded_calls`); for five tensors that is as
long as a launch. torch.compile's guards compare the same properties in a tenth of the time. A hit implies an equal
signature. A miss proves nothing, because torch's guards also compare inference mode, autocast and the type of a tensor,
which are not in a signature. After a miss the call is looked up by its signature.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsa.runtime.torch_shortcuts import HAS_SHORTCUTS, TensorGuards, current_device

Guard = Callable[..., bool]


def guard(arguments: tuple[Any, ...], in_place: Sequence[tuple[int, int]] = ()) -> Guard | None:
    """Return a function of arguments that returns True only if they have the signature of `arguments` and, for tensors
    on a GPU, this GPU is the current one. Return None if these arguments cannot be compared, or if this torch lacks the
    guards.

    in_place  pairs of argument positions. The guard also compares whether the two tensors of a pair begin at the same
              address
    """
    if not HAS_SHORTCUTS:
        return None
    tensors: dict[str, torch.Tensor] = {}  # without repetitions, as torch's guards require
    names: dict[str, Any] = {}
    kinds, numbers = [], []  # conditions on lists, to be checked first; conditions on numbers and repeated tensors
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
    """Return the condition, as Python code, that the argument `name` equals `value`. Return None for infinite or NaN
    floats, and for types that guards do not support."""
    if value is None or type(value) is bool:
        return f"{name} is {value}"
    if type(value) is int or type(value) is str:
        return f"type({name}) is {type(value).__name__} and {name} == {value!r}"
    if type(value) is float and math.isfinite(value):
        same = f"{name} == {value!r}" if value else f"repr({name}) == '{value!r}'"  # repr tells -0.0 from 0.0
        return f"type({name}) is float and {same}"
    if type(value) is torch.dtype:
        constant = f"dtype{len(names)}"
        names[constant] = value
        return f"{name} is {constant}"
    return None


def _addresses(
    tensors: dict[str, torch.Tensor], arguments: tuple[Any, ...], in_place: Sequence[tuple[int, int]]
) -> list[str]:
    """Return conditions, as Python code. Each tensor has the same address modulo 16 as in `arguments`. The two tensors
    of a pair of `in_place` begin at the same address exactly if they do so in `arguments`."""
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
