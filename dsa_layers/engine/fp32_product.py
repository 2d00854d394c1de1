"""x W^T in fp32 for inference: router logits, index weights, compressors and the language model's logits."""

import torch
from torch import nn

import dsa
from dsa.kernels.gemm.linear_fp32_limits import CHANNEL_MULTIPLE, MAX_TOKENS
from dsa.reference.autocast import without_autocast
from dsa.runtime import backends
from dsa_layers.engine.batch_invariance import has_any_rows
from dsa_layers.layers.linear import HALVES

# The kernel is used up to so many results. For more, PyTorch's product is faster: in the kernel each tile of tokens
# reads the whole matrix.
MOST_RESULTS = 3 * 2**14


@without_autocast
def fp32_product(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, *, scaled_from: int = 0) -> torch.Tensor:
    """y = x W^T, summed in fp32; the columns from `scaled_from` on are multiplied by `scale`.

    x [..., I], weight [O, I] -> fp32 [..., O], without gradients. On a GPU 16-bit operands of one dtype go through the
    tensor cores, whose products are exact. Few of them are `dsa.linear_fp32`, and in batch-invariant passes all.
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
    """Whether the kernel takes the operands, and is faster."""
    if x.dim() != 2 or x.shape[1] % CHANNEL_MULTIPLE:
        return False
    few = len(x) <= MAX_TOKENS and len(x) * len(weight) <= MOST_RESULTS
    if not few or not has_aligned_rows(x) or not has_aligned_rows(weight):
        return False
    return not x.is_cuda or backends.runs_kernel("linear_fp32", x)


def has_aligned_rows(x: torch.Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    apart = len(x) < 2 or x.stride(0) * x.element_size() % 16 == 0
    return x.stride(-1) == 1 and apart and x.data_ptr() % 16 == 0
