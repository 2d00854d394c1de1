"""What torch.compile's code calls in place of torch's public functions, which cost several times as much of the host.

    TensorGuards     a check of tensors' types, dtypes, devices, sizes, strides, dispatch keys and requires_grad, in C++
    empty_cuda       (sizes, strides, dtype): memory of the current GPU
    empty_cpu        the same of the host
    reinterpret      (tensor, sizes, strides, offset): memory of the tensor from so many elements behind its first

They are private to torch, so they are used with the versions that they were tested with. With others HAS_SHORTCUTS is
False, and calls take torch's public way.
"""

import torch

HAS_SHORTCUTS = (2, 11) <= tuple(int(part) for part in torch.__version__.split(".")[:2]) <= (2, 14)

if HAS_SHORTCUTS:
    from torch._C._dynamo import guards

    TensorGuards, reinterpret = guards.TensorGuards, guards._reinterpret_tensor
    empty_cpu, empty_cuda = guards._empty_strided_cpu, guards._empty_strided_cuda
else:
    TensorGuards = empty_cpu = empty_cuda = reinterpret = None
