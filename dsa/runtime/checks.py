"""Checks of tensors, dtypes, devices and values, and views or copies of tensors with the layouts that kernels accept.

The message of a check names the argument, what it got and what is accepted.
"""

import contextlib
import math
import numbers
import operator
import reprlib
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
E4M3 = (torch.float8_e4m3fn,)
INT32 = (torch.int32,)
INT_MAX = 2**31 - 1  # the largest int argument of an op; kernels count in int32
MOST_SLOTS = INT_MAX + 1  # in a paged cache, so that a slot's index fits in int32
# Layouts that kernels require of a tensor's memory. References accept any layout.
ANY = "any strides"
INNER = "the last dimension contiguous"
ROWS = "the last dimension contiguous, rows at multiples of 16 bytes"
CONTIGUOUS = "contiguous"
ALIGNED = "contiguous, from a multiple of 16 bytes on"
PAGES = "the first dimension's entries contiguous each, and at multiples of 16 bytes"


def check_tensor(
    name: str, value: object, dtypes: Sequence[torch.dtype], shape: Sequence[int | str], sizes_of: str = ""
) -> None:
    """Check that `value` is a tensor of one of `dtypes` and of `shape`, in which a str stands for any size.

    sizes_of  the arguments that determined the sizes, for the message: the mistake may be in one of them
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:  # torch crashes when it indexes some of these
        got = "a nested tensor" if value.is_nested else f"layout {str(value.layout).removeprefix('torch.')}"
        raise ValueError(f"{name}: must be a dense tensor, got {got}")
    if value.dtype not in dtypes:
        raise ValueError(f"{name}: dtype must be {_names(dtypes)}, got {_names((value.dtype,))}")
    if not _has_sizes(value, shape):
        origin = f" (sizes as of {sizes_of})" if sizes_of else ""
        raise ValueError(f"{name}: shape must be [{', '.join(map(str, shape))}], got {list(value.shape)}{origin}")


def is_tensor(value: object, dtypes: Sequence[torch.dtype], shape: Sequence[int | str]) -> bool:
    """Whether `check_tensor` would pass."""
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
    """Return the shape of a tensor; () for values without a shape, which `check_tensor` refuses."""
    return tuple(value.shape) if isinstance(value, torch.Tensor) and not value.is_nested else ()


def check_same_dtype(first: tuple[str, torch.Tensor], **others: torch.Tensor | None) -> None:
    name, tensor = first
    for other, value in others.items():
        if value is not None and value.dtype != tensor.dtype:
            raise ValueError(f"{other}: dtype must be {name}'s {_names((tensor.dtype,))}, got {_names((value.dtype,))}")


def check_same_device(first: tuple[str, torch.Tensor], **others: torch.Tensor | None) -> None:
    name, tensor = first
    device = tensor.device
    for other, value in others.items():
        if value is not None and value.device != device:
            raise ValueError(f"{other}: must be on {name}'s device {device}, got {value.device}")


def torch_device(name: str, value: object) -> torch.device:
    """Return `value` as a torch.device. It may be the number of a GPU. The device need not exist."""
    if isinstance(value, torch.device):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError(f"{name}: must be a torch.device or its name, got {type(value).__name__}")
    try:
        return torch.device(value)
    except RuntimeError:  # an unknown name, or a device number on a machine without GPUs
        raise ValueError(f"{name}: must be a torch.device or its name, got {value!r}") from None


def check_memory(name: str, value: torch.Tensor) -> None:
    """Check that `value` is not on the meta device. For functions that run a reference."""
    if value.is_meta:
        raise ValueError(f"{name}: must be on a device with memory, got a tensor on meta")


def check_address(name: str, value: torch.Tensor) -> None:
    """Check that `value` has an address, which kernels need. Tensors that wrap others, such as DTensor, have none."""
    if torch.compiler.is_compiling() or not value.numel() or value.device.type == "meta":
        return
    if _address(value) is None:
        raise ValueError(f"{name}: must be a tensor with memory, got {type(value).__name__}, which has no address")


def check_updatable(name: str, value: torch.Tensor) -> None:
    """Outside inference mode, torch refuses to update tensors that were made in it. Kernels do not."""
    if value.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(f"{name}: was made in inference mode, must be written in inference mode too")


def check_writable(name: str, value: torch.Tensor) -> None:
    """Check that an op may write to `value` in place: its strides rule out that two elements share memory, and in grad
    mode it does not require a gradient."""
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
    """Check that `value`, to which the op writes, does not begin at the address of one of `others`, which the op reads.

    This check does nothing under torch.compile, and for tensors without an address, which other checks refuse.
    """
    if torch.compiler.is_compiling():
        return
    for other, tensor in others.items():
        if isinstance(tensor, torch.Tensor) and _address(tensor) == _address(value) is not None:
            raise ValueError(f"{name}: is written, must not share memory with {other}, got two at one address")


def _address(value: object) -> int | None:
    """Return the address of a tensor; None for other values and for tensors without one."""
    try:
        return value.data_ptr() or None if isinstance(value, torch.Tensor) else None
    except RuntimeError:  # a sparse, nested or fake tensor
        return None


def check_dtype(name: str, value: object, dtypes: Sequence[torch.dtype]) -> None:
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{name}: must be a torch.dtype, got {type(value).__name__}")
    if value not in dtypes:
        raise ValueError(f"{name}: must be {_names(dtypes)}, got {_names((value,))}")


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return alternatives(map(dtype_name, dtypes))


def check_layout(name: str, x: torch.Tensor, layout: str) -> None:
    """Raise ValueError unless x has this layout, one of the constants ANY to PAGES. Strides of dimensions with fewer
    than two elements do not matter."""
    if not x.numel():
        return
    if layout in (CONTIGUOUS, ALIGNED) and not x.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, got strides {list(x.stride())}")
    if layout == ALIGNED and x.data_ptr() % 16:
        raise ValueError(f"{name}: must start at a multiple of 16 bytes, got an address {x.data_ptr() % 16} past one")
    if layout in (INNER, ROWS) and x.dim() and x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name}: the last dimension must be contiguous, got strides {list(x.stride())}")
    if layout == ROWS:
        strides = [s * x.element_size() for s, n in zip(x.stride()[:-1], x.shape[:-1]) if n > 1]
        if x.data_ptr() % 16 or any(s % 16 for s in strides):
            raise ValueError(
                f"{name}: rows must start at multiples of 16 bytes, got an address {x.data_ptr() % 16} bytes past one "
                f"and strides of {strides} bytes"
            )
    if layout == PAGES:
        if not x[0].is_contiguous():
            raise ValueError(f"{name}: every page must be contiguous, got strides {list(x.stride())}")
        stride = x.stride(0) * x.element_size() if len(x) > 1 else 0
        if x.data_ptr() % 16 or stride % 16:
            raise ValueError(
                f"{name}: pages must start at multiples of 16 bytes, got an address {x.data_ptr() % 16} bytes past one "
                f"and a page stride of {stride} bytes"
            )


def check_mergeable(name: str, x: torch.Tensor, first: int, end: int) -> None:
    """Raise ValueError unless the dimensions first:end of x can be viewed as one dimension."""
    dims = range(x.dim())[first:end]
    if len(dims) < 2 or not x.numel():
        return
    try:
        x.view(*x.shape[:first], -1, *x.shape[end:])
    except RuntimeError:
        raise ValueError(
            f"{name}: dimensions {dims[0]} to {dims[-1]} must be mergeable into one with a single stride, got shape "
            f"{list(x.shape)} with strides {list(x.stride())}"
        ) from None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the dtype's name without "torch.", as compile functions expect it."""
    return str(dtype).removeprefix("torch.")


def with_dims(x: torch.Tensor, dims: int) -> torch.Tensor:
    """Return a view of x with `dims` dimensions: the first ones are merged, or ones of size 1 are added in front."""
    missing = dims - x.dim()
    if missing == 0:
        return x
    return x[(None,) * missing] if missing > 0 else x.view(-1, *x.shape[1 - dims :])


def unit_inner(x: torch.Tensor) -> torch.Tensor:
    """Return x, with a stride of 1 in a last dimension of size 1, where torch's stride is arbitrary."""
    if x.shape[-1] == 1 and x.stride(-1) != 1:
        return x.as_strided(x.shape, (*x.stride()[:-1], 1))
    return x


def rows_at_16_bytes(x: torch.Tensor) -> torch.Tensor | None:
    """Return x if its last dimension is contiguous and its rows start at multiples of 16 bytes, otherwise None.

    The strides of dimensions with a single element are arbitrary. If only these strides are wrong, the result is a view
    of x with other strides.
    """
    multiple = 16 // x.element_size()
    strides = list(x.stride())
    if strides[-1] == 1 and not any(s % multiple for s in strides[:-1]) and x.data_ptr() % 16 == 0:
        return x
    wrong = [i for i, s in enumerate(strides) if (s != 1 if i == x.dim() - 1 else s % multiple)]
    if x.data_ptr() % 16 or any(x.shape[i] > 1 for i in wrong):
        return None
    for i in wrong:
        strides[i] = 1 if i == x.dim() - 1 else multiple
    return x.as_strided(x.shape, strides)


def tma_rows(x: torch.Tensor) -> torch.Tensor:
    """Return `rows_at_16_bytes(x)`, or a contiguous copy of x if that is None. Strides of 0, as in expanded tensors,
    need no copy."""
    same = rows_at_16_bytes(x)
    return x.clone(memory_format=torch.contiguous_format) if same is None else same


_FP32_MAX = torch.finfo(torch.float32).max
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def check_int(name: str, value: object, least: int | None, most: int | None = INT_MAX) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: must be an integer, got {shown(value)}")
    if least is not None and value < least:
        raise ValueError(f"{name}: must be at least {least}, got {shown(value)}")
    if most is not None and value > most:
        raise ValueError(f"{name}: must be at most {most}, got {shown(value)}")


def check_positive(name: str, value: object, most: int = INT_MAX) -> None:
    check_int(name, value, 1, most)


def integer(name: str, value: Any, *, at_least: int | None = None, at_most: int | None = None) -> int:
    """Return `value` as an int. In contrast to `check_int`, accept other libraries' integers, such as numpy's."""
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):  # `check_int` raises the error
            value = operator.index(value)
    check_int(name, value, at_least, at_most)
    return value


def check_number(name: str, value: object, least: float | None = None) -> None:
    """Check that `value` is a number that is finite in fp32 and, if `least` is given, at least `least`. An int must fit
    in 64 bits."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name}: must be a number, got {shown(value)}")
    if not -_FP32_MAX <= value <= _FP32_MAX:  # also false for NaN
        raise ValueError(f"{name}: must be finite in fp32, got {shown(value)}")
    if isinstance(value, int) and not _INT64_MIN <= value <= _INT64_MAX:
        raise ValueError(f"{name}: must be a float or an int of 64 bits, got {shown(value)}")
    if least is not None and value < least:
        raise ValueError(f"{name}: must be at least {least}, got {shown(value)}")


def number(name: str, value: Any) -> float:
    """Return `value` as a float, or an infinity if a float cannot represent it. In contrast to `check_number`, accept
    other libraries' real numbers, infinities and NaN."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: must be a number, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, (bool, torch.SymBool)):
        raise TypeError(f"{name}: must be True or False, got {shown(value)}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}: must be {alternatives(map(repr, choices))}, got {shown(value)}")
    if value not in choices:
        raise ValueError(f"{name}: must be {alternatives(map(repr, choices))}, got {shown(value)}")


def check_instance(name: str, value: object, kind: type, what: str) -> None:
    """Raise TypeError if `value` is not an instance of `kind`. what: the description of `kind` in the message"""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: must be {what}, got {type(value).__name__}")


def check_pair(name: str, value: object, what: str) -> tuple:
    """Return `value` as a tuple of two. what: the two values in words, for the message"""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        got = f"{len(value)} of them" if isinstance(value, (tuple, list)) else type(value).__name__
        raise TypeError(f"{name}: must be a pair {what}, got {got}")
    return tuple(value)


def path_of(name: str, value: Any) -> Path:
    """Return `value` as a Path. Raise TypeError if it is neither a string nor a path."""
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{name}: must be a string or a path, got {shown(value)}")
    return Path(value)


def alternatives(words: Iterable[str]) -> str:
    """Return the words with commas, and "or" before the last one."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


class _Repr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200
        self.maxlong = 60
        self.maxlist = self.maxtuple = self.maxdict = 8
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        try:
            return super().repr_int(x, level)
        except ValueError:  # Python limits the number of digits that it converts
            return f"an integer of {x.bit_length()} bits"


class _JsonRepr(_Repr):
    def repr_bool(self, x: bool, level: int) -> str:
        return "true" if x else "false"

    def repr_NoneType(self, x: None, level: int) -> str:
        return "null"


_REPR, _JSON_REPR = _Repr(), _JsonRepr()


def shown(value: Any) -> str:
    """Return the repr of `value` for an error message, on one line. A long repr is shortened in the middle or after the
    first items, so values from untrusted files cannot make a message long."""
    return " ".join(_REPR.repr(value).split())


def shown_json(value: Any) -> str:
    """Return `shown` for a value from a JSON file. True, False and None are written as true, false and null."""
    return " ".join(_JSON_REPR.repr(value).split())
