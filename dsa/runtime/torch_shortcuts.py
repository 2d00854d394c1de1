"""Private functions of torch that torch.compile's code calls. Public ones take the host several times as long.

    TensorGuards     checks tensors' types, dtypes, devices, sizes, strides, dispatch keys and requires_grad, in C++
    empty_cuda       (sizes, strides, dtype) -> a tensor on the current GPU
    empty_cpu        the same on the host
    reinterpret      (tensor, sizes, strides, offset) -> a view that begins `offset` elements after the tensor's first
    current_device   () -> the index of the current GPU; None in a torch without CUDA

If this torch lacks one, or one does something else, HAS_SHORTCUTS is False, calls use torch's public functions, and a
warning says so once.
"""

import warnings
from types import ModuleType

import torch


def works(guards: ModuleType) -> bool:
    """Whether torch's private module has these functions, and those for the host do what they should."""
    x = torch.arange(6.0, device="cpu").view(2, 3)
    try:
        check = guards.TensorGuards(x, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]]).check
        empty, part = guards._empty_strided_cpu((2,), (1,), x.dtype), guards._reinterpret_tensor(x, (2,), (1,), 4)
        told_apart = check(x + 1) and not check(x.int()) and not check(x.T)
        of_gpu = [guards._empty_strided_cuda]
        if torch.version.cuda is not None:
            of_gpu.append(torch._C._cuda_getDevice)
        right = told_apart and empty.shape == (2,) and part.tolist() == [4, 5]
        return right and all(map(callable, of_gpu))
    except (AttributeError, TypeError, RuntimeError):
        return False


try:
    from torch._C._dynamo import guards
except ImportError:
    guards = ModuleType("guards")

HAS_SHORTCUTS = works(guards)

if HAS_SHORTCUTS:
    TensorGuards, reinterpret = guards.TensorGuards, guards._reinterpret_tensor
    empty_cpu, empty_cuda = guards._empty_strided_cpu, guards._empty_strided_cuda
    current_device = getattr(torch._C, "_cuda_getDevice", None)
else:
    TensorGuards = empty_cpu = empty_cuda = reinterpret = current_device = None
    warnings.warn(
        f"dsa: torch {torch.__version__} lacks private functions that 2.11 to 2.15 have: each call of an op costs the "
        "host some microseconds more",
        stacklevel=2,
    )
