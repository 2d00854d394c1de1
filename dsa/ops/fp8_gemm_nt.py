"""Matrix products of block-scaled FP8 operands, and the casts of weights, which are PyTorch by design."""

import functools
from collections.abc import Callable

import torch

from dsa import backends
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import check_same_device, dtype_name
from reference import fp8_cast
from reference import fp8_gemm as reference

per_block_cast_to_fp8 = fp8_cast.per_block_cast_to_fp8
dequantize_per_block = fp8_cast.dequantize_per_block

Scaled = tuple[torch.Tensor, torch.Tensor]


def fp8_gemm_nt(a: Scaled, b: Scaled, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """y[m, n] = sum_g (sum_{k in block g} q[m, k] w[n, k]) * s[m, g] * ws[n // 128, g], g over blocks of 128 channels.

    a          (q [..., M, K] e4m3, s [..., M, ceil(K / 128)] fp32): the activations and their scales
    b          (w [N, K] e4m3, ws [ceil(N / 128), ceil(K / 128)] fp32): the weight, row-major, and its scales
    out_dtype  float32, bfloat16 or float16

    Returns [..., M, N]. Scales are any fp32 numbers and multiply; N and K may end inside a block. A row's result
    depends on no other row. No rows or no channels: an empty or a zero result.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices.
    On Hopper: one kernel; K a multiple of 16, N of 8, rows of w at multiples of 16 bytes. Within a block the tensor
    cores sum with about 14 bits, the blocks are added in order in fp32. Deterministic. CUDA-graph safe.
    Source: DeepGEMM's `fp8_gemm_nt`, and `fp8_gemm` of DeepSeek-V3.2's inference code.
    """
    return (torch.ops.dsa.fp8_gemm_nt if torch.compiler.is_compiling() else _one)(*a, *b, out_dtype)


def grouped_fp8_gemm_nt(
    a: Scaled, b: Scaled, ends: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """`fp8_gemm_nt` of each row with one of E weights: rows ends[e - 1] to ends[e] - 1 with weight e, ends[-1] being 0.

    a          (q [M, K] e4m3, s [M, ceil(K / 128)] fp32)
    b          (w [E, N, K] e4m3, ws [E, ceil(N / 128), ceil(K / 128)] fp32)
    ends       int32 [E], ascending from at least 0 to M: a weight's rows may be none
    out_dtype  float32, bfloat16 or float16

    Returns [M, N]. A row's result depends on no other row.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices, and for ends that are not so; on a GPU
    these are not looked at by the host: rows that are no weight's are then undefined, and nothing else is touched.
    On Hopper: one kernel, no padding of rows and no host synchronisation; limits as of `fp8_gemm_nt`, E up to 1024.
    Source: DeepGEMM's `m_grouped_fp8_gemm_nt_contiguous`, whose groups have padded rows and an index a row.
    """
    return (torch.ops.dsa.grouped_fp8_gemm_nt if torch.compiler.is_compiling() else _grouped)(*a, *b, ends, out_dtype)
