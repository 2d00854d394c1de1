"""Argument checks of the references and of the ops. Every message names the argument, what it got and what is accepted.

Numbers may also be ones that torch.compile does not know yet (SymInt, SymFloat).
"""

from collections.abc import Iterable, Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
E4M3 = (torch.float8_e4m3fn,)
INT32 = (torch.int32,)
INT_MAX = 2**31 - 1  # of every int: what kernels take, and what an int32 can count
MOST_SLOTS = INT_MAX + 1  # of a paged cache, which an int32 can number
_FP32_MAX = torch.finfo(torch.float32).max
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def check_tensor(
    name: str, value: object, dtypes: Sequence[torch.dtype], shape: Sequence[int | str], sizes_of: str = ""
) -> None:
    """`value` is a tensor of one of `dtypes` and of `shape`: an int is a size it must have, a str names any size.

    sizes_of  the arguments that the sizes come from: either they or this one may be the wrong one
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:  # torch crashes where it indexes some of these
        got = "a nested tensor" if value.is_nested else f"layout {str(value.layout).removeprefix('torch.')}"
        raise ValueError(f"{name}: must be a dense tensor, got {got}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name}: dtype must be {_names(dtypes)}, got {_names((value.dtype,))}")
    if not _has_sizes(value, shape):
        origin = f" (sizes as of {sizes_of})" if sizes_of else ""
        raise ValueError(f"{name}: shape must be [{', '.join(map(str, shape))}], got {list(value.shape)}{origin}")


def is_tensor(value: object, dtypes: Sequence[torch.dtype], shape: Sequence[int | str]) -> bool:
    """Whether `check_tensor` has nothing to say of it."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_nested:
        return False
    return value.dtype in dtypes and _has_sizes(value, shape)


def _has_sizes(value: torch.Tensor, shape: Sequence[int | str]) -> bool:
    sizes = value.shape
    if len(sizes) != len(shape):
        return False
    for want, got in zip(shape, sizes):
        if want != got and isinstance(want, int):
            return False
    return True


def shape_of(value: object) -> tuple[int, ...]:
    """The shape of an argument of any shape; () of what `check_tensor` refuses because it has none."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) and not value.is_nested else ()


def check_same_dtype(first: tuple[str, torch.Tensor], **others: torch.Tensor | None) -> None:
    """All tensors have the first one's dtype."""
    name, tensor = first
    for other, value in others.items():
        if value is not None and value.dtype != tensor.dtype:
            raise ValueError(f"{other}: dtype must be {name}'s {_names((tensor.dtype,))}, got {_names((value.dtype,))}")


def check_same_device(first: tuple[str, torch.Tensor], **others: torch.Tensor | None) -> None:
    """All tensors are on the first one's device."""
    name, tensor = first
    device = tensor.device
    for other, value in others.items():
        if value is not None and value.device != device:
            raise ValueError(f"{other}: must be on {name}'s device {device}, got {value.device}")


def torch_device(name: str, value: object) -> torch.device:
    """`value` as a torch.device: one, or what torch makes one of. Whether it is there is not asked."""
    if isinstance(value, torch.device):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError(f"{name}: must be a torch.device or its name, got {type(value).__name__}")
    try:
        return torch.device(value)
    except RuntimeError:  # of a name that torch does not know, and without a GPU of any number
        raise ValueError(f"{name}: must be a torch.device or its name, got {value!r}") from None


def check_memory(name: str, value: torch.Tensor) -> None:
    """`value` is not on the meta device, where tensors have shapes alone. A reference asks, a launch need not."""
    if value.is_meta:
        raise ValueError(f"{name}: must be on a device with memory, got a tensor on meta")


def check_updatable(name: str, value: torch.Tensor) -> None:
    """torch lets a reference write to `value` here and now; kernels do not ask torch."""
    if value.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name}: was made in inference mode, must be written in inference mode too")


def check_writable(name: str, value: torch.Tensor) -> None:
    """An op may write to `value` in place: no two of its numbers share memory, each dimension steps over all that is
    below it, and autograd does not watch it."""
    strides, extent = value.stride(), 1
    for stride, size in sorted(zip(strides, value.shape)):
        if stride < extent and size > 1:
            raise ValueError(
                f"{name}: its numbers must not share memory, got strides {list(strides)} of sizes "
                f"{list(value.shape)}: each dimension must step over those below it"
            )
        extent += stride * (size - 1)
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: is written in place, must not require gradients; use torch.no_grad()")


def check_apart(name: str, value: torch.Tensor, **others: object) -> None:
    """`value`, which is written, begins where none of the tensors `others`, which are read, does. What is compiled, or
    has no address, is not looked at: its own checks refuse the latter."""
    if torch.compiler.is_compiling():
        return
    for other, tensor in others.items():
        if isinstance(tensor, torch.Tensor) and _address(tensor) == _address(value) is not None:
            raise ValueError(f"{name}: is written, must not share memory with {other}, got two at one address")


def _address(value: object) -> int | None:
    try:
        return value.data_ptr() or None
    except (AttributeError, RuntimeError):  # no tensor, or a sparse, nested or fake one
        return None


def check_int(name: str, value: object, least: int, most: int = INT_MAX) -> None:
    """`value` is an int from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}: must be at least {least}, got {_shown(value)}")
    if value > most:
        raise ValueError(f"{name}: must be at most {most}, got {_shown(value)}")


def check_positive(name: str, value: object, most: int = INT_MAX) -> None:
    check_int(name, value, 1, most)


def check_number(name: str, value: object, least: float | None = None) -> None:
    """`value` is a finite number of fp32, and at least `least` if that is given; an int is one of 64 bits as well."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name}: must be a number, got {type(value).__name__}")
    if not -_FP32_MAX <= value <= _FP32_MAX:  # NaN is not
        raise ValueError(f"{name}: must be finite in fp32, got {_shown(value)}")
    if isinstance(value, int) and not _INT64_MIN <= value <= _INT64_MAX:
        raise ValueError(f"{name}: must be a float or an int of 64 bits, got {value}")
    if least is not None and value < least:
        raise ValueError(f"{name}: must be at least {least}, got {_shown(value)}")


def check_flag(name: str, value: object) -> None:
    """`value` is True or False, not merely something that counts as one of them."""
    if not isinstance(value, (bool, torch.SymBool)):
        raise TypeError(f"{name}: must be True or False, got {type(value).__name__}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """`value` is one of some strings."""
    if not isinstance(value, str):
        raise TypeError(f"{name}: must be {_listed(map(repr, choices))}, got {type(value).__name__}")
    if value not in choices:
        raise ValueError(f"{name}: must be {_listed(map(repr, choices))}, got {value!r}")


def check_dtype(name: str, value: object, dtypes: Sequence[torch.dtype]) -> None:
    """`value` is one of some dtypes."""
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name}: must be a torch.dtype, got {type(value).__name__}")
    if value not in dtypes:
        raise ValueError(f"{name}: must be {_names(dtypes)}, got {_names((value,))}")


def check_pair(name: str, value: object, what: str) -> tuple:
    """Return `value` as a tuple. Raises TypeError unless it is a tuple or a list of two."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        got = f"{len(value)} of them" if isinstance(value, (tuple, list)) else type(value).__name__
        raise TypeError(f"{name}: must be a pair {what}, got {got}")
    return tuple(value)


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return _listed(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def _shown(value: object) -> object:
    """`value` for a message. Python refuses to write down an int of more than some thousand digits."""
    return f"an int of {value.bit_length()} bits" if isinstance(value, int) and value.bit_length() > 128 else value
