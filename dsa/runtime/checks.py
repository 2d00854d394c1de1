"""Checks of tensors, dtypes and devices, and views or copies of tensors with the layouts that kernels accept.

The message of a check names the argument, what it got and what is accepted.
"""

from collections.abc import Sequence

import torch

from dsa.runtime.values import INT_MAX, alternatives

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
E4M3 = (torch.float8_e4m3fn,)
INT32 = (torch.int32,)
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
