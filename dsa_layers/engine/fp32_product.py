"""Products in fp32 for inference, and the batch-invariant mode, which makes results independent of the batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

import torch
from torch import nn

import dsa
from dsa.kernels.gemm.linear_fp32_limits import CHANNEL_MULTIPLE, MAX_TOKENS
from dsa.reference.autocast import without_autocast
from dsa.runtime import backends
from dsa_layers.layers.linear import HALVES

# Limit on the number of results (tokens times weight rows) for the kernel of `dsa.linear_fp32` outside batch-invariant
# decoding. For more results, PyTorch's product is likely to be faster.
MOST_RESULTS = 3 * 2**14


@without_autocast
def fp32_product(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, *, scaled_from: int = 0) -> torch.Tensor:
    """Return y = x W^T, accumulated in fp32, with y's columns from `scaled_from` on multiplied by `scale`.

    x [..., I], weight W [O, I] -> y fp32 [..., O]. On a GPU, 16-bit operands of one dtype are multiplied without
    conversion: within fp32's range, the product of two 16-bit numbers is exact in fp32. Other operands are converted to
    fp32 first.
    """
    halves = x.dtype == weight.dtype and x.dtype in HALVES
    if halves and has_any_rows():
        rows = x.flatten(0, -2).split(MAX_TOKENS)
        parts = [dsa.linear_fp32(part, weight, scale, scaled_from=scaled_from) for part in rows]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).unflatten(0, x.shape[:-1])
    if halves and _are_few(x, weight):
        return dsa.linear_fp32(x, weight, scale, scaled_from=scaled_from)
    if halves and x.is_cuda:
        y = torch.mm(x.flatten(0, -2), weight.T, out_dtype=torch.float32).unflatten(0, x.shape[:-1])
    else:
        y = nn.functional.linear(x.float(), weight.float())
    if scale != 1:
        y[..., scaled_from:].mul_(scale)
    return y


def _are_few(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether the kernel of `dsa.linear_fp32` supports the operands' shapes and alignment and is likely to be
    faster than PyTorch's product. On a GPU without the kernel, return False."""
    if x.dim() != 2 or x.shape[1] % CHANNEL_MULTIPLE:
        return False
    few = len(x) <= MAX_TOKENS and len(x) * len(weight) <= MOST_RESULTS
    if not few or not has_aligned_rows(x) or not has_aligned_rows(weight):
        return False
    return not x.is_cuda or backends.runs_kernel("linear_fp32", x)


def has_aligned_rows(x: torch.Tensor) -> bool:
    """Return whether every row is contiguous and begins at an address that is a multiple of 16 bytes."""
    apart = len(x) < 2 or x.stride(0) * x.element_size() % 16 == 0
    return x.stride(-1) == 1 and apart and x.data_ptr() % 16 == 0


_PASS: ContextVar[str | None] = ContextVar("batch_invariant", default=None)


@contextmanager
def batch_invariant(kind: Literal["decoding", "prompt"] | None) -> Iterator[None]:
    """Make the passes inside the `with` block batch-invariant.

    kind: "decoding" for decoding passes, "prompt" for passes over one prompt. None: the passes are not batch-invariant.
    """
    token = _PASS.set(kind)
    try:
        yield
    finally:
        _PASS.reset(token)


def is_batch_invariant() -> bool:
    """Return whether the current pass is batch-invariant."""
    return _PASS.get() is not None


def of_attention() -> dict[str, bool]:
    """Return the keyword arguments that batch invariance adds to a call of an attention op; {} without it."""
    return {"enable_batch_invariant": True} if is_batch_invariant() else {}


def has_any_rows() -> bool:
    """Return whether the current pass is a batch-invariant decoding pass. In such a pass, the bits of a row must not
    depend on the number of rows. So the caller must not choose by this number between kernels with different
    rounding."""
    return _PASS.get() == "decoding"
