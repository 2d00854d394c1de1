"""Matrix products of block-scaled FP8 operands, and the casts of weights, which are PyTorch by design."""

import functools
import math
from collections.abc import Callable
from types import ModuleType

import torch

from dsa import backends
from dsa.kernels.gemm import limits
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops.declaration import op
from dsa.reference.gemm import fp8_cast
from dsa.reference.gemm import fp8_gemm_nt as reference

__all__ = ["dequantize_per_block", "fp8_gemm_nt", "grouped_fp8_gemm_nt", "per_block_cast_to_fp8"]

per_block_cast_to_fp8 = fp8_cast.per_block_cast_to_fp8
dequantize_per_block = fp8_cast.dequantize_per_block

Scaled = tuple[torch.Tensor, torch.Tensor]
_known_ends: dict[torch.device, torch.Tensor] = {}


def fp8_gemm_nt(a: Scaled, b: Scaled, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """y[m, n] = sum_g (sum_{k in block g} q[m, k] w[n, k]) * s[m, g] * ws[n // 128, g], g over blocks of 128 channels.

    a          (q [..., M, K] e4m3, s [..., M, ceil(K / 128)] fp32): the activations and their scales
    b          (w [N, K] e4m3, ws [ceil(N / 128), ceil(K / 128)] fp32): the weight, row-major, and its scales
    out_dtype  float32, bfloat16 or float16

    Returns [..., M, N]. Scales are any fp32 numbers, and multiply. N and K need not be multiples of 128: the last block
    is then smaller. A row's result depends on no other row. Without rows the result is empty, without channels zero.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices.
    On Hopper: one kernel; K a multiple of 16, N of 8, rows of w at multiples of 16 bytes. Within a block the tensor
    cores sum with about 14 bits; the blocks are added in their order in fp32. Deterministic. CUDA-graph safe.
    Source: DeepGEMM's `fp8_gemm_nt`, and `fp8_gemm` of DeepSeek-V3.2's inference code.
    """
    return _fp8_gemm_nt(*reference.pair("a", a), *reference.pair("b", b), out_dtype)


def grouped_fp8_gemm_nt(
    a: Scaled, b: Scaled, ends: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """`fp8_gemm_nt` of each row with one of E weights: rows ends[e - 1] to ends[e] - 1 with weight e, ends[-1] being 0.

    a          (q [M, K] e4m3, s [M, ceil(K / 128)] fp32): the activations and their scales
    b          (w [E, N, K] e4m3, ws [E, ceil(N / 128), ceil(K / 128)] fp32): the weights and their scales
    ends       int32 [E], ascending from at least 0 to M; a weight may have no rows
    out_dtype  float32, bfloat16 or float16

    Returns [M, N]. A row's result depends on no other row.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices, and where the reference runs, for ends
    that do not ascend from at least 0 to M. The kernel does not see these in time: a weight whose ends decrease or are
    outside has no rows, and the result is undefined in rows that belong to no weight.
    On Hopper: one kernel, no padding of rows and no host synchronisation; K and N as `fp8_gemm_nt` takes them, E up to
    1024. Source: DeepGEMM's `m_grouped_fp8_gemm_nt_contiguous`, which pads the rows of a group and takes an index for
    each row.
    """
    return _grouped_fp8_gemm_nt(*reference.pair("a", a), *reference.pair("b", b), ends, out_dtype)


def _reference(
    q: torch.Tensor, s: torch.Tensor, w: torch.Tensor, ws: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    return reference.fp8_gemm_nt((q, s), (w, ws), out_dtype)


def _results(q: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], len(w)), dtype=out_dtype)


def _grouped_reference(
    q: torch.Tensor, s: torch.Tensor, w: torch.Tensor, ws: torch.Tensor, ends: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    return reference.grouped_fp8_gemm_nt((q, s), (w, ws), ends, out_dtype)


def _grouped_results(q: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty((len(q), w.shape[1]), dtype=out_dtype)


def _check_limits(q: torch.Tensor, w: torch.Tensor) -> None:
    (columns, channels), rows = w.shape[-2:], math.prod(q.shape[:-1])
    if rows == 0 or w.numel() == 0:
        return
    if channels % limits.K_MULTIPLE or columns % limits.N_MULTIPLE:
        raise ValueError(
            f"b[0]: the kernel takes K that is a multiple of {limits.K_MULTIPLE} and N of {limits.N_MULTIPLE}, got "
            f"[N, K] = [{columns}, {channels}]"
        )
    if rows > limits.MAX_ROWS:
        raise ValueError(f"a[0]: the kernel takes at most {limits.MAX_ROWS} rows, got {rows}")


def _check_grouped_limits(q: torch.Tensor, w: torch.Tensor) -> None:
    if len(w) > limits.MAX_MATRICES:
        raise ValueError(f"b[0]: the kernel takes at most {limits.MAX_MATRICES} weights, got {len(w)}")
    _check_limits(q, w)


@op(
    arguments=reference.FP8_GEMM_NT,
    reference=_reference,
    results=_results,
    kernels={"sm_90": "dsa.kernels.gemm.fp8_gemm_sm90"},
    limits=_check_limits,
)
def _fp8_gemm_nt(
    kernels: ModuleType, q: torch.Tensor, s: torch.Tensor, w: torch.Tensor, ws: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    out = _results(q, w, out_dtype)
    if q.dim() == 2:
        _launch(kernels, q, s, w[None], ws[None], _all_rows(q.device), out)
    else:
        rows = math.prod(q.shape[:-1])
        flat = (x.reshape(rows, x.shape[-1]) for x in (q, s))
        _launch(kernels, *flat, w[None], ws[None], _all_rows(q.device), out.view(rows, len(w)))
    return out


@op(
    arguments=reference.GROUPED_FP8_GEMM_NT,
    reference=_grouped_reference,
    results=_grouped_results,
    kernels={"sm_90": "dsa.kernels.gemm.fp8_gemm_sm90"},
    limits=_check_grouped_limits,
)
def _grouped_fp8_gemm_nt(
    kernels: ModuleType,
    q: torch.Tensor,
    s: torch.Tensor,
    w: torch.Tensor,
    ws: torch.Tensor,
    ends: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    out = _grouped_results(q, w, out_dtype)
    _launch(kernels, q, s, w, ws, ends.contiguous(), out)
    return out


def _launch(
    kernels: ModuleType,
    q: torch.Tensor,
    s: torch.Tensor,
    w: torch.Tensor,
    ws: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """out [M, N] = the products of q [M, K] with w [E, N, K]."""
    (rows, channels), (matrices, columns) = q.shape, w.shape[:2]
    if channels == 0:
        out.zero_()
    if out.numel() == 0 or channels == 0 or matrices == 0:
        return
    aligned = rows_at_16_bytes(q)
    q = q.contiguous().clone() if aligned is None else aligned
    multiprocessors = backends.num_sms(q.device)
    launch = _kernel(kernels, out.dtype, rows, columns, matrices, multiprocessors)
    launch(q, _scales(s), w.view(-1, channels), _scales(ws), ends, out, multiprocessors)


def _scales(x: torch.Tensor) -> torch.Tensor:
    """x [..., G] as the kernel takes it: contiguous, from a multiple of 16 bytes on, G a multiple of 4."""
    if x.shape[-1] % 4:
        return torch.nn.functional.pad(x, (0, -x.shape[-1] % 4))
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@functools.lru_cache(4096)
def _kernel(
    kernels: ModuleType, out_dtype: torch.dtype, rows: int, columns: int, matrices: int, multiprocessors: int
) -> Callable[..., None]:
    config = kernels.choose_config(rows, columns, matrices, multiprocessors)
    return kernels.compile_fp8_gemm(dtype_name(out_dtype), config)


def _all_rows(device: torch.device) -> torch.Tensor:
    """The end of a single matrix's rows: beyond any, which the kernel takes for the last. It is kept for later calls,
    unless a graph is being captured, whose tensors hold nothing before its replay."""
    ends = _known_ends.get(device)
    if ends is None:
        ends = torch.full((1,), 2**31 - 1, dtype=torch.int32, device=device)
        if not torch.cuda.is_current_stream_capturing():
            _known_ends[device] = ends
    return ends
