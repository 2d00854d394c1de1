"""Product of a few tokens with a 16-bit matrix, with fp32 results."""

import torch

from dsa.kernels.gemm.linear_fp32_limits import CHANNEL_MULTIPLE, MAX_ROWS, MAX_TOKENS, choose_config
from dsa.reference.gemm import linear_fp32 as reference
from dsa.runtime.declare import (
    ROWS,
    Arguments,
    Int,
    Number,
    Tensor,
    at_most,
    dtype_name,
    multiple_of,
    op,
    rows_at_16_bytes,
)

__all__ = ["linear_fp32"]

HALVES = (torch.bfloat16, torch.float16)


LINEAR_FP32 = Arguments(
    x=Tensor("T I", HALVES, layout=ROWS),
    weight=Tensor("O I", HALVES, like="x", layout=ROWS),
    scale=Number(),
    scaled_from=Int(least=0, most="O"),
)


def linear_fp32(x: torch.Tensor, weight: torch.Tensor, scale: float = 1.0, *, scaled_from: int = 0) -> torch.Tensor:
    """y[t, o] = s_o sum_k x[t, k] W[o, k], summed and returned in fp32; s_o = scale for o >= scaled_from, otherwise 1.

    x            [T, I] bf16 or fp16
    weight       W [O, I] of x's dtype
    scale        a finite number that multiplies the sums
    scaled_from  the first row of W whose sums are multiplied by `scale`; it is above 0 if W concatenates the matrices
                 of several layers and only the last layer has a scale

    Returns y fp32 [T, O], contiguous. Differentiable in x and weight: if a gradient is needed, the formula runs in
    PyTorch. Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel, T up to 64, O up to 2^20 - 16, I a multiple of 32, rows of x and weight at multiples of 16
    bytes. The kernel reads W once per 32 tokens and is meant for few tokens: above about T * O = 50000 results,
    `torch.mm(x, weight.T, out_dtype=torch.float32)` is likely to be faster. The order of the sum depends only on I, so
    a row of y has the same bits for any T, and a column of y for any O.
    Deterministic. CUDA-graph safe.
    """
    return _linear_fp32(x, weight, scale, scaled_from)


def _results(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((len(x), len(weight)), dtype=torch.float32)


@op(
    arguments=LINEAR_FP32,
    reference=reference.linear_fp32,
    results=_results,
    limits={"T": at_most(MAX_TOKENS), "I": multiple_of(CHANNEL_MULTIPLE), "O": at_most(MAX_ROWS)},
    differentiable=True,
)
def _linear_fp32(x: torch.Tensor, weight: torch.Tensor, scale: float, scaled_from: int) -> torch.Tensor:
    from dsa.kernels.gemm.linear_fp32_sm90 import compile_linear_fp32

    y = _results(x, weight)
    if not x.shape[1]:
        return y.zero_()
    if y.numel():
        launch = compile_linear_fp32(dtype_name(x.dtype), choose_config(len(x), *weight.shape))
        launch(rows_at_16_bytes(x), rows_at_16_bytes(weight), y, float(scale), scaled_from)
    return y
