"""Matrix products of block-scaled FP8 operands, and the casts of weights, which are PyTorch by design."""

import functools
import math
from collections.abc import Callable

import torch

from dsa import backends
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import dtype_name
from dsa.reference.gemm import fp8_cast
from dsa.reference.gemm import fp8_gemm_nt as reference

per_block_cast_to_fp8 = fp8_cast.per_block_cast_to_fp8
dequantize_per_block = fp8_cast.dequantize_per_block

Scaled = tuple[torch.Tensor, torch.Tensor]
MOST_MATRICES = 1024
MOST_ROWS = 2**27
_known_ends: dict[torch.device, torch.Tensor] = {}


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
    operands = *reference.pair("a", a), *reference.pair("b", b)
    return (torch.ops.dsa.fp8_gemm_nt if torch.compiler.is_compiling() else _one)(*operands, out_dtype)


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
    these are not looked at by the host: a weight whose ends decrease or are outside then has no rows, and what is in
    rows that are no weight's is undefined.
    On Hopper: one kernel, no padding of rows and no host synchronisation; limits as of `fp8_gemm_nt`, E up to 1024.
    Source: DeepGEMM's `m_grouped_fp8_gemm_nt_contiguous`, whose groups have padded rows and an index a row.
    """
    operands = *reference.pair("a", a), *reference.pair("b", b), ends
    return (torch.ops.dsa.grouped_fp8_gemm_nt if torch.compiler.is_compiling() else _grouped)(*operands, out_dtype)


def _one(q: torch.Tensor, s: torch.Tensor, w: torch.Tensor, ws: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    reference.check((q, s), (w, ws), out_dtype)
    if not backends.runs_kernel("fp8_gemm_nt", q):
        return reference.fp8_gemm_nt((q, s), (w, ws), out_dtype)
    out = q.new_empty((*q.shape[:-1], len(w)), dtype=out_dtype)
    rows = math.prod(q.shape[:-1])
    flat = (x.reshape(rows, x.shape[-1]) for x in (q, s))
    _launch(*flat, w[None], ws[None], _all_rows(q.device), out.view(rows, len(w)))
    return out


def _grouped(
    q: torch.Tensor, s: torch.Tensor, w: torch.Tensor, ws: torch.Tensor, ends: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    reference.check_grouped((q, s), (w, ws), ends, out_dtype)
    if not backends.runs_kernel("grouped_fp8_gemm_nt", q):
        return reference.grouped_fp8_gemm_nt((q, s), (w, ws), ends, out_dtype)
    if len(w) > MOST_MATRICES:
        raise ValueError(f"b: at most {MOST_MATRICES} weights, got {len(w)}")
    out = q.new_empty((len(q), w.shape[1]), dtype=out_dtype)
    _launch(q, s, w, ws, ends.contiguous(), out)
    return out


def _launch(
    q: torch.Tensor, s: torch.Tensor, w: torch.Tensor, ws: torch.Tensor, ends: torch.Tensor, out: torch.Tensor
) -> None:
    """out [M, N] = the products of q [M, K] with w [E, N, K]."""
    (rows, channels), (matrices, columns) = q.shape, w.shape[:2]
    if channels == 0:
        out.zero_()
    if out.numel() == 0 or channels == 0 or matrices == 0:
        return
    if channels % 16 or columns % 8:
        raise ValueError(
            f"b[0]: the kernel takes K that is a multiple of 16 and N of 8, got [N, K] = [{columns}, {channels}]"
        )
    if rows > MOST_ROWS:
        raise ValueError(f"a[0]: the kernel takes at most {MOST_ROWS} rows, got {rows}")
    if not w.is_contiguous() or w.data_ptr() % 16:
        raise ValueError(f"b[0]: must be contiguous, from a multiple of 16 bytes on, got strides {list(w.stride())}")
    aligned = rows_at_16_bytes(q)
    q = q.contiguous().clone() if aligned is None else aligned
    multiprocessors = backends.num_sms(q.device)
    launch = _kernel(out.dtype, rows, columns, matrices, multiprocessors)
    with backends.on_device(q):
        launch(q, _scales(s), w.view(-1, channels), _scales(ws), ends, out, multiprocessors)


def _scales(x: torch.Tensor) -> torch.Tensor:
    """x [..., G] as the kernel takes it: contiguous, from a multiple of 16 bytes on, G a multiple of 4."""
    if x.shape[-1] % 4:
        return torch.nn.functional.pad(x, (0, -x.shape[-1] % 4))
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@functools.lru_cache(4096)
def _kernel(
    out_dtype: torch.dtype, rows: int, columns: int, matrices: int, multiprocessors: int
) -> Callable[..., None]:
    from dsa.kernels.gemm import fp8_gemm_sm90 as kernels

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


torch.library.custom_op("dsa::fp8_gemm_nt", mutates_args=())(_one)
torch.library.custom_op("dsa::grouped_fp8_gemm_nt", mutates_args=())(_grouped)


@torch.library.register_fake("dsa::fp8_gemm_nt")
def _(q: torch.Tensor, s: torch.Tensor, w: torch.Tensor, ws: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    reference.check((q, s), (w, ws), out_dtype)
    return q.new_empty((*q.shape[:-1], len(w)), dtype=out_dtype)


@torch.library.register_fake("dsa::grouped_fp8_gemm_nt")
def _(
    q: torch.Tensor, s: torch.Tensor, w: torch.Tensor, ws: torch.Tensor, ends: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    reference.check_grouped((q, s), (w, ws), ends, out_dtype)
    return q.new_empty((len(q), w.shape[1]), dtype=out_dtype)
