"""The product x W^T in fp32. Inference uses it for router logits, index weights, compressors and vocabulary logits."""

import torch
from torch import nn

import dsa
from dsa.kernels.gemm.linear_fp32_limits import CHANNEL_MULTIPLE, MAX_TOKENS
from dsa.reference.autocast import without_autocast
from dsa.runtime import backends
from dsa_layers.engine.batch_invariance import has_any_rows
from dsa_layers.layers.linear import HALVES

# Use the kernel for at most this number of results. For more results PyTorch's product is faster, because each token
# tile of the kernel reads the whole matrix.
MOST_RESULTS = 3 * 2**14


@without_autocast
def fp32_product(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, *, scaled_from: int = 0) -> torch.Tensor:
    """Return y = x W^T, accumulated in fp32, with the columns from `scaled_from` on multiplied by `scale`.

    x [..., I], weight [O, I] -> fp32 [..., O], without gradients. On a GPU, tensor cores multiply 16-bit operands of
    equal dtype; each such product is exact in fp32. `dsa.linear_fp32` computes small products, and all 16-bit products
    of batch-invariant decoding passes.
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
    """Return whether the kernel accepts the operands and is faster than PyTorch's product."""
    if x.dim() != 2 or x.shape[1] % CHANNEL_MULTIPLE:
        return False
    few = len(x) <= MAX_TOKENS and len(x) * len(weight) <= MOST_RESULTS
    if not few or not has_aligned_rows(x) or not has_aligned_rows(weight):
        return False
    return not x.is_cuda or backends.runs_kernel("linear_fp32", x)


def has_aligned_rows(x: torch.Tensor) -> bool:
    """Return whether every row begins at a multiple of 16 bytes."""
    apart = len(x) < 2 or x.stride(0) * x.element_size() % 16 == 0
    return x.stride(-1) == 1 and apart and x.data_ptr() % 16 == 0
