"""Tensors as a kernel's 16-byte loads can read them."""

import torch


def rows_at_16_bytes(x: torch.Tensor) -> torch.Tensor | None:
    """x if its last dimension is contiguous and its rows start at multiples of 16 bytes, None if not.

    The strides of dimensions with a single element mean nothing: where one would be in the way, x is viewed anew.
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
