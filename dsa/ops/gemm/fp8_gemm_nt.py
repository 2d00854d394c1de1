"""Products of block-scaled FP8 matrices, and casts of weights. The casts run in PyTorch on every device."""

import functools
import math
from typing import TYPE_CHECKING

import torch

from dsa.kernels.gemm import limits
from dsa.ops.gemm._operands import SCALES, WEIGHT_SCALES, check_rows, pair
from dsa.reference.gemm import fp8_cast
from dsa.reference.gemm import fp8_gemm_nt as reference
from dsa.runtime import backends
from dsa.runtime.declare import (
    ALIGNED,
    E4M3,
    F32,
    FLOATS,
    INT32,
    ROWS,
    Arguments,
    Dtype,
    Flag,
    Int,
    Tensor,
    at_most,
    check_memory,
    dtype_name,
    multiple_of,
    op,
    rows_at_16_bytes,
    tma_rows,
)

if TYPE_CHECKING:
    from dsa.kernels.gemm.fp8_gemm_choice import Tile
    from dsa.kernels.gemm.fp8_gemm_config import Fp8GemmConfig
    from dsa.kernels.gemm.fp8_gemm_few_rows_config import FewRowsConfig

__all__ = ["dequantize_per_block", "fp8_gemm_nt", "grouped_fp8_gemm_nt", "per_block_cast_to_fp8"]

# Limits of expected rows, in all and per matrix, for the small-M kernel of grouped products (`has_few_rows`).
FEW_ROWS, FEW_ROWS_OF_A_MATRIX = 64, 8

Scaled = tuple[torch.Tensor, torch.Tensor]

FP8_GEMM_NT = Arguments(
    first=("w", "ws"),
    q=Tensor("... K", E4M3, name="a[0]"),
    s=Tensor("... ceil(K/128) | ... 4*ceil(K/512)", F32, name="a[1]"),
    w=Tensor("N K", E4M3, layout=ROWS, name="b[0]"),
    ws=Tensor("ceil(N/128) ceil(K/128) | ceil(N/128) 4*ceil(K/512)", F32, name="b[1]"),
    out_dtype=Dtype(FLOATS),
)
GROUPED_FP8_GEMM_NT = Arguments(
    rule=check_rows,
    first=("w", "ws"),
    q=Tensor("A K", E4M3, name="a[0]"),
    s=Tensor(SCALES, F32, name="a[1]"),
    w=Tensor("E N K", E4M3, layout=ALIGNED, name="b[0]"),
    ws=Tensor(WEIGHT_SCALES, F32, name="b[1]"),
    ends=Tensor("E", INT32),
    out_dtype=Dtype(FLOATS),
    rows=Tensor("M", INT32, optional=True),
    weights=Tensor("M", F32, optional=True),
    expected_rows=Int(least=0, optional=True),
)
LIMITS = {"K": multiple_of(limits.K_MULTIPLE), "N": multiple_of(limits.N_MULTIPLE, most=limits.MAX_COLUMNS)}
GROUPED_LIMITS = LIMITS | {
    "E": at_most(limits.MAX_MATRICES),
    "A": at_most(limits.MAX_ROWS),
    "M": at_most(limits.MAX_ROWS),
    "E*N": at_most(limits.MAX_COLUMNS),
}
PER_BLOCK_CAST_TO_FP8 = Arguments(w=Tensor("O I", FLOATS), use_ue8m0=Flag(), block=Int())
DEQUANTIZE_PER_BLOCK = Arguments(
    first=("block",),
    q=Tensor("O I", E4M3),
    scale=Tensor("ceil(O/block) ceil(I/block)", (torch.float32, torch.float8_e8m0fnu)),
    dtype=Dtype((*FLOATS, torch.float64)),
    block=Int(),
)


def per_block_cast_to_fp8(
    w: torch.Tensor, use_ue8m0: bool = True, block: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = round_to_e4m3(w * (1 / scale)), scale = max(amax(|w|), 1e-4) / 448 over each block x block tile of a weight.

    w          [O, I] fp32, bf16 or fp16
    use_ue8m0  True: the scale is rounded up to a power of two; False: it is not
    block      rows and columns of a tile; the last tiles may be smaller

    Returns q [O, I] e4m3 and scale [ceil(O / block), ceil(I / block)] fp32; w ~ q * scale (the scale multiplies).
    Raises TypeError or ValueError for other types, dtypes and shapes.
    """
    PER_BLOCK_CAST_TO_FP8.check(w, use_ue8m0, block)
    check_memory("w", w)
    return fp8_cast.per_block_cast_to_fp8(w, use_ue8m0, block)


def dequantize_per_block(
    q: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float32, block: int = 128
) -> torch.Tensor:
    """w[i, j] = q[i, j] * scale[i // block, j // block], computed in fp32 and rounded to `dtype`.

    q      [O, I] e4m3
    scale  [ceil(O / block), ceil(I / block)] fp32 or e8m0
    dtype  dtype of the result: fp32, bf16, fp16 or float64
    block  rows and columns of a tile; the last tiles may be smaller

    Returns [O, I] in `dtype`. q and scale can come from `per_block_cast_to_fp8`.
    Raises TypeError or ValueError for other types, dtypes and shapes.
    """
    DEQUANTIZE_PER_BLOCK.check(q, scale, dtype, block)
    check_memory("q", q)
    return fp8_cast.dequantize_per_block(q, scale, dtype, block)


def fp8_gemm_nt(a: Scaled, b: Scaled, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """y[m, n] = sum_g (sum_{k in block g} q[m, k] w[n, k]) * s[m, g] * ws[n // 128, g], g over blocks of 128 channels.

    a          (q [..., M, K] e4m3, s [..., M, ceil(K / 128)] fp32): activations and their scales
    b          (w [N, K] e4m3, ws [ceil(N / 128), ceil(K / 128)] fp32): row-major weight and its scales; both may be
               slices of wider tensors
    out_dtype  float32, bfloat16 or float16

    Returns [..., M, N]. Scales may be any fp32 numbers. N and K may be any numbers: the last block may be smaller than
    128. A row's result depends on no other row. If M or N is 0 the result is empty, and if K is 0 it is zeros.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices.
    On Hopper: one kernel, K a multiple of 16, N a multiple of 8 and below 2^31. The kernel reads w in place if its rows
    start at multiples of 16 bytes. It reads scales in place if they have a multiple of 4 columns and their rows start
    at multiples of 16 bytes; otherwise the call copies them. So s and ws may have 4 ceil(K / 512) columns instead of
    ceil(K / 128): the added columns change no result, if s[m, g] * ws[n, g] is finite for them. Within a block the
    tensor cores accumulate with a precision of about 14 bits; the sums of blocks are added in order in fp32.
    Deterministic. CUDA-graph safe, no host synchronisation.
    Source: DeepGEMM's `fp8_gemm_nt`, and `fp8_gemm` of DeepSeek-V3.2's inference code.
    """
    return _fp8_gemm_nt(*pair("a", a), *pair("b", b), out_dtype)


def grouped_fp8_gemm_nt(
    a: Scaled,
    b: Scaled,
    ends: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    rows: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """`fp8_gemm_nt` of each row with one of E weights: rows ends[e - 1] to ends[e] - 1 with weight e, and rows before
    ends[0] with weight 0. Rows from ends[E - 1] on belong to no expert: no product is computed for them.

    a              (q [A, K] e4m3, s [A, ceil(K / 128)] fp32): activations and their scales
    b              (w [E, N, K] e4m3, ws [E, ceil(N / 128), ceil(K / 128)] fp32): weights and their scales
    ends           int32 [E], ascending from at least 0 to at most M: where the rows of each weight end. One, several or
                   all weights may have no rows
    out_dtype      float32, bfloat16 or float16
    rows           int32 [M]: row m of the product uses row rows[m] of a, from 0 to A - 1; a row may be used several
                   times. None: the rows of a in order, M = A
    weights        fp32 [M]: out[m] = round(sums[m] * weights[m]), multiplied in fp32 and rounded once; None: 1
    expected_rows  what the caller expects ends[E - 1] to be, from 0 to M. It changes the speed but no bit of the
                   result; ends[E - 1] may differ. None: M

    Returns [M, N]. A row's result depends on no other row. The result of rows that belong to no expert is undefined:
    kernels do not write it, the reference fills it with NaN. The values of a, `rows` and `weights` for these rows do
    not matter.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices. The reference also raises ValueError for
    ends that do not ascend from at least 0 to at most M, and for rows[m] outside a in a row m of an expert. The kernel
    cannot raise these errors: it treats a weight as one without rows if the weight's end is before the previous end or
    outside [0, M]. The result is then undefined in rows that belong to no weight, and where rows[m] is outside a.
    On Hopper: no padding of rows and no host synchronisation; K and N as for `fp8_gemm_nt`, E up to 1024, E N below
    2^31. The time depends only on the experts' rows. The op chooses the kernel and the work tiles by the expected rows;
    the choice changes no bit. With `rows` and up to 4096 expected rows, the kernel gathers the rows of a. With more
    expected rows the call first copies all M rows, also those that belong to no expert, because this is faster. Without
    `rows` and `weights`, a small-M kernel runs if E > 1 and at most 64 rows in all, or at most 8 per weight on average,
    are expected.
    Source: DeepGEMM's `m_grouped_fp8_gemm_nt_contiguous`, which pads the rows of a group and takes an index per row.
    """
    return _grouped_fp8_gemm_nt(*pair("a", a), *pair("b", b), ends, out_dtype, rows, weights, expected_rows)


def _results(q: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], len(w)), dtype=out_dtype)


def _grouped_results(
    q: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, rows: torch.Tensor | None
) -> torch.Tensor:
    return q.new_empty((len(q if rows is None else rows), w.shape[1]), dtype=out_dtype)


@op(
    arguments=FP8_GEMM_NT,
    reference=reference.fp8_gemm_nt,
    results=_results,
    limits=LIMITS | {"rows": at_most(limits.MAX_ROWS)},
)
def _fp8_gemm_nt(
    q: torch.Tensor, s: torch.Tensor, w: torch.Tensor, ws: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    out = _results(q, w, out_dtype)
    if q.dim() == 2:
        write_product(q, s, w, ws, out)
    else:
        rows = math.prod(q.shape[:-1])
        flat = (x.reshape(rows, x.shape[-1]) for x in (q, s))
        write_product(*flat, w, ws, out.view(rows, len(w)))
    return out


@op(
    arguments=GROUPED_FP8_GEMM_NT,
    reference=reference.grouped_fp8_gemm_nt,
    results=_grouped_results,
    limits=GROUPED_LIMITS,
)
def _grouped_fp8_gemm_nt(
    q: torch.Tensor,
    s: torch.Tensor,
    w: torch.Tensor,
    ws: torch.Tensor,
    ends: torch.Tensor,
    out_dtype: torch.dtype,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
    expected_rows: int | None,
) -> torch.Tensor:
    out = _grouped_results(q, w, out_dtype, rows)
    write_grouped_product(q, s, w, ws, ends, out, rows, weights, expected_rows)
    return out


def write_product(q: torch.Tensor, s: torch.Tensor, w: torch.Tensor, ws: torch.Tensor, out: torch.Tensor) -> None:
    """Write `fp8_gemm_nt((q, s), (w, ws))` to out [M, N]. q [M, K] and w [N, K] may be slices of wider tensors."""
    from dsa.kernels.gemm.fp8_gemm_few_rows_config import FewRowsConfig
    from dsa.kernels.gemm.fp8_gemm_few_rows_sm90 import compile_fp8_gemm_few_rows
    from dsa.kernels.gemm.fp8_gemm_sm90 import compile_fp8_gemm

    (rows, channels), columns = q.shape, len(w)
    if channels == 0:
        out.zero_()
    if out.numel() == 0 or channels == 0:
        return
    sms, dtype = backends.num_sms(q.device), dtype_name(out.dtype)
    a, scales = (aligned_rows(q), aligned_scales(s)), aligned_scales(ws[None])
    config = _choose_config(rows, columns, channels, sms)
    if isinstance(config, FewRowsConfig):
        compile_fp8_gemm_few_rows(dtype, config)(*a, tma_rows(w), scales, out, sms)
    else:
        compile_fp8_gemm(dtype, config)(*a, tma_rows(w), scales.permute(1, 2, 0), out, sms)


def write_grouped_product(
    q: torch.Tensor,
    s: torch.Tensor,
    w: torch.Tensor,
    ws: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    expected_rows: int | None = None,
) -> None:
    """Write `grouped_fp8_gemm_nt((q, s), (w, ws), ends)` to out [M, N]. w is [E, N, K]. The other arguments are those
    of `grouped_fp8_gemm_nt`."""
    from dsa.kernels.gemm.fp8_gemm_few_rows_sm90 import compile_grouped_fp8_gemm_few_rows
    from dsa.kernels.gemm.fp8_gemm_sm90 import compile_grouped_fp8_gemm

    (matrices, columns), channels, count = w.shape[:2], q.shape[1], len(out)
    if channels == 0 or len(q) == 0:
        out.zero_()
    if out.numel() == 0 or channels == 0 or matrices == 0 or len(q) == 0:
        return
    sms, dtype = backends.num_sms(q.device), dtype_name(out.dtype)
    expected = rows_to_choose_for(count, expected_rows)
    if has_few_rows(expected, matrices, rows) and weights is None:
        launch = compile_grouped_fp8_gemm_few_rows(dtype, _choose_grouped_few_rows_config(expected, matrices))
        a, b = (aligned_rows(q), aligned_scales(s)), (w.view(-1, channels), aligned_scales(ws))
        launch(*a, *b, out, ends.contiguous(), sms)
        return
    q, s, rows = gathered_rows(q, s, rows, expected)
    is_dynamic = rows is None and schedules_dynamically(expected, matrices)
    gathered, weighted = rows is not None, weights is not None
    config = _choose_grouped_config(expected, columns, channels, matrices, sms, gathered, is_dynamic)
    launch = compile_grouped_fp8_gemm(dtype, config, gathered, weighted, is_dynamic)
    counter = tile_counter(q, is_dynamic)
    b = w.view(-1, channels), aligned_scales(ws).permute(1, 2, 0)
    of_rows = weights.contiguous() if weighted else None
    launch(aligned_rows(q), aligned_scales(s), rows, *b, ends.contiguous(), out, of_rows, None, counter, sms)


def rows_to_choose_for(count: int, expected_rows: int | None) -> int:
    """Return the number of rows for which kernel and tile are chosen. Every choice gives right results for any number
    of rows."""
    return count if expected_rows is None else max(expected_rows, 1)


def has_few_rows(expected: int, matrices: int, rows: torch.Tensor | None) -> bool:
    """Whether to run the small-M kernel of grouped products. It is faster if loading the weights takes nearly all of
    the time. It does not gather `rows`, and does not support `weights`."""
    return matrices > 1 and expected <= max(FEW_ROWS, FEW_ROWS_OF_A_MATRIX * matrices) and rows is None


def gathered_rows(
    q: torch.Tensor, s: torch.Tensor, rows: torch.Tensor | None, expected: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the arguments (q, s, rows) of a kernel that gathers rows unless `rows` is None.

    For more than GATHERED_ROWS expected rows a copy is faster. This function then returns copies of the rows, and None
    for `rows`.
    """
    from dsa.kernels.gemm.fp8_gemm_config import GATHERED_ROWS

    if rows is None or expected <= GATHERED_ROWS:
        return q, s, None if rows is None else rows.contiguous()
    return *copied_rows(q, s, rows), None


def copied_rows(q: torch.Tensor, s: torch.Tensor, rows: torch.Tensor | None) -> Scaled:
    """Return copies of the rows `rows` of q and s. An index outside q is clamped; that row's result is undefined
    anyway."""
    if rows is None:
        return q, s
    rows = rows.clamp(0, len(q) - 1)
    return q.view(torch.uint8)[rows].view(q.dtype), s[rows]


def schedules_dynamically(rows: int, matrices: int) -> bool:
    """Whether to schedule work tiles dynamically: faster if work tiles take different times."""
    return matrices > 1 and rows >= max(limits.DYNAMIC_ROWS, limits.DYNAMIC_ROWS_OF_A_MATRIX * matrices)


def tile_counter(like: torch.Tensor, is_dynamic: bool) -> torch.Tensor | None:
    return torch.zeros(1, dtype=torch.int32, device=like.device) if is_dynamic else None


def aligned_rows(q: torch.Tensor) -> torch.Tensor:
    aligned = rows_at_16_bytes(q)
    return q.clone(memory_format=torch.contiguous_format) if aligned is None else aligned


def aligned_scales(x: torch.Tensor) -> torch.Tensor:
    """Return scales x [..., G] with rows at multiples of 16 bytes and G padded to a multiple of 4."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 4)) if x.shape[-1] % 4 else tma_rows(x)


@functools.lru_cache(4096)
def _choose_config(rows: int, columns: int, channels: int, sms: int) -> "Tile":
    from dsa.kernels.gemm.fp8_gemm_choice import choose_for_one_matrix

    return choose_for_one_matrix(rows, columns, channels, sms)


@functools.lru_cache(4096)
def _choose_grouped_config(
    rows: int, columns: int, channels: int, matrices: int, sms: int, gathered: bool, is_dynamic: bool
) -> "Fp8GemmConfig":
    from dsa.kernels.gemm import fp8_gemm_config as configs

    sizes = rows, columns, channels, matrices, sms
    if is_dynamic:
        return configs.choose_dynamic_config(*sizes)
    return configs.choose_config(*sizes, configs.GATHERING_CONFIGS if gathered else configs.CONFIGS)


@functools.lru_cache(4096)
def _choose_grouped_few_rows_config(rows: int, matrices: int) -> "FewRowsConfig":
    from dsa.kernels.gemm.fp8_gemm_few_rows_config import choose_grouped_config

    return choose_grouped_config(rows, matrices)
