"""Matrix products of block-scaled FP8 operands, and the casts of weights, which are PyTorch by design."""

import functools
import math
from typing import TYPE_CHECKING

import torch

from dsa.kernels.gemm import limits
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops._tma_rows import tma_rows
from dsa.reference.gemm import fp8_cast
from dsa.reference.gemm import fp8_gemm_nt as reference
from dsa.runtime import backends
from dsa.runtime.op import op

if TYPE_CHECKING:
    from dsa.kernels.gemm.fp8_gemm_choice import Tile
    from dsa.kernels.gemm.fp8_gemm_config import Fp8GemmConfig
    from dsa.kernels.gemm.fp8_gemm_few_rows_config import FewRowsConfig

__all__ = ["dequantize_per_block", "fp8_gemm_nt", "grouped_fp8_gemm_nt", "per_block_cast_to_fp8"]

per_block_cast_to_fp8 = fp8_cast.per_block_cast_to_fp8
dequantize_per_block = fp8_cast.dequantize_per_block

# The kernel for few rows multiplies several matrices with up to so many rows in all, or per matrix on average.
FEW_ROWS, FEW_ROWS_OF_A_MATRIX = 64, 8

Scaled = tuple[torch.Tensor, torch.Tensor]


def fp8_gemm_nt(a: Scaled, b: Scaled, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """y[m, n] = sum_g (sum_{k in block g} q[m, k] w[n, k]) * s[m, g] * ws[n // 128, g], g over blocks of 128 channels.

    a          (q [..., M, K] e4m3, s [..., M, ceil(K / 128)] fp32): the activations and their scales
    b          (w [N, K] e4m3, ws [ceil(N / 128), ceil(K / 128)] fp32): the weight, row-major, and its scales; both may
               be columns of wider ones
    out_dtype  float32, bfloat16 or float16

    Returns [..., M, N]. Scales are any fp32 numbers, and multiply. N and K need not be multiples of 128: the last block
    is then smaller. A row's result depends on no other row. Without rows the result is empty, without channels zero.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices.
    On Hopper: one kernel, which reads w where it is, at any distance of its rows that is a multiple of 16 bytes, and
    the scales likewise; behind a copy of these where ceil(K / 128) is no multiple of 4, or their rows begin elsewhere.
    K a multiple of 16, N of 8 and below 2^31. Within a block the tensor cores sum with about 14 bits; the blocks are
    added in their order in fp32. Deterministic. CUDA-graph safe, no host synchronisation.
    Source: DeepGEMM's `fp8_gemm_nt`, and `fp8_gemm` of DeepSeek-V3.2's inference code.
    """
    return _fp8_gemm_nt(*reference.pair("a", a), *reference.pair("b", b), out_dtype)


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
    """`fp8_gemm_nt` of each row with one of E weights: rows before ends[0] with weight 0, ends[e - 1] to ends[e] - 1
    with weight e. Rows from ends[E - 1] on belong to no expert: no product is computed for them.

    a              (q [A, K] e4m3, s [A, ceil(K / 128)] fp32): the activations and their scales
    b              (w [E, N, K] e4m3, ws [E, ceil(N / 128), ceil(K / 128)] fp32): the weights and their scales
    ends           int32 [E], ascending from at least 0 to at most M; a weight may have no rows, and all of them none
    out_dtype      float32, bfloat16 or float16
    rows           int32 [M]: row m of the product is of row rows[m] of a, from 0 to A - 1; the same one may stand
                   several times. None: the rows of a as they are, M = A
    weights        fp32 [M]: out[m] = round(sums[m] * weights[m]), the product in fp32; None: 1
    expected_rows  how many rows are expected before ends[E - 1], from 0 to M, which decides nothing but how fast they
                   are computed: the bits are the same whatever it is, and `ends` may say anything else. None: M

    Returns [M, N]. A row's result depends on no other row. The result of rows of no expert is undefined: kernels do not
    write it, the reference fills it with NaN. What a, `rows` and `weights` hold there does not matter.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices, and where the reference runs, for ends
    that do not ascend from at least 0 to at most M and for rows outside a that are a weight's. The kernel does not see
    these in time: a weight whose ends decrease or are outside has no rows, and the result is undefined in rows that
    belong to no weight, and where rows[m] is outside a.
    On Hopper: no padding of rows and no host synchronisation; K and N as `fp8_gemm_nt` takes them, E up to 1024, E N
    below 2^31. The time is that of the weights' rows; the work tiles and the kernel, which change no bit, are chosen
    for the expected rows. Up to 4096 of these the kernel gathers `rows` of a; of more a copy is made before, also
    of the rows of no expert, which is faster there. Up to 64 in all, or 8 a weight on average, have a kernel of their
    own, without `rows` and `weights`.
    Source: DeepGEMM's `m_grouped_fp8_gemm_nt_contiguous`, which pads the rows of a group and takes an index for each
    row.
    """
    return _grouped_fp8_gemm_nt(
        *reference.pair("a", a), *reference.pair("b", b), ends, out_dtype, rows, weights, expected_rows
    )


def _results(q: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return q.new_empty((*q.shape[:-1], len(w)), dtype=out_dtype)


def _grouped_results(
    q: torch.Tensor, w: torch.Tensor, out_dtype: torch.dtype, rows: torch.Tensor | None
) -> torch.Tensor:
    return q.new_empty((len(q if rows is None else rows), w.shape[1]), dtype=out_dtype)


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
    check_columns(w)


def check_columns(w: torch.Tensor) -> None:
    """w [.., N, K] has no more columns of products than the kernels count, of all matrices."""
    columns = math.prod(w.shape[:-1])
    if columns > limits.MAX_COLUMNS:
        raise ValueError(f"b[0]: the kernel takes at most {limits.MAX_COLUMNS} rows of all weights, got {columns}")


def check_grouped_limits(q: torch.Tensor, w: torch.Tensor, rows: torch.Tensor | None) -> None:
    """What the kernels do not take, of grouped products."""
    if len(w) > limits.MAX_MATRICES:
        raise ValueError(f"b[0]: the kernel takes at most {limits.MAX_MATRICES} weights, got {len(w)}")
    _check_limits(q, w)
    if rows is not None and len(rows) > limits.MAX_ROWS:
        raise ValueError(f"rows: the kernel takes at most {limits.MAX_ROWS} rows, got {len(rows)}")


@op(
    arguments=reference.FP8_GEMM_NT,
    reference=reference.fp8_gemm_nt,
    results=_results,
    limits=_check_limits,
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
    arguments=reference.GROUPED_FP8_GEMM_NT,
    reference=reference.grouped_fp8_gemm_nt,
    results=_grouped_results,
    limits=check_grouped_limits,
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
    """Write the product of q [M, K] and w [N, K], whose rows may be parts of longer ones, to out [M, N]."""
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
    """Write the products of q [M, K], or of its rows `rows`, with w [E, N, K], times weights [M], to out [M, N]."""
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
    drawn = rows is None and draws(expected, matrices)
    gathered, weighted = rows is not None, weights is not None
    config = _choose_grouped_config(expected, columns, channels, matrices, sms, gathered, drawn)
    launch = compile_grouped_fp8_gemm(dtype, config, gathered, weighted, drawn)
    counter = tile_counter(q, drawn)
    b = w.view(-1, channels), aligned_scales(ws).permute(1, 2, 0)
    of_rows = weights.contiguous() if weighted else None
    launch(aligned_rows(q), aligned_scales(s), rows, *b, ends.contiguous(), out, of_rows, None, counter, sms)


def rows_to_choose_for(count: int, expected_rows: int | None) -> int:
    """Of `count` rows, those for which kernels and work tiles are chosen. All of them take any number of rows."""
    return count if expected_rows is None else max(expected_rows, 1)


def has_few_rows(expected: int, matrices: int, rows: torch.Tensor | None) -> bool:
    """Whether so many rows of several matrices are so few that weights are all that is loaded; rows: what is
    gathered."""
    return matrices > 1 and expected <= max(FEW_ROWS, FEW_ROWS_OF_A_MATRIX * matrices) and rows is None


def gathered_rows(
    q: torch.Tensor, s: torch.Tensor, rows: torch.Tensor | None, expected: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return (q, s, rows) as the kernel gets them.

    The kernel gathers few rows faster than a copy does, and many rows slower: then q and s are copies.
    """
    from dsa.kernels.gemm.fp8_gemm_config import GATHERED_ROWS

    if rows is None or expected <= GATHERED_ROWS:
        return q, s, None if rows is None else rows.contiguous()
    return *copied_rows(q, s, rows), None


def copied_rows(q: torch.Tensor, s: torch.Tensor, rows: torch.Tensor | None) -> Scaled:
    """q and s of these rows. Rows that there are not are read from others; their results are undefined."""
    if rows is None:
        return q, s
    rows = rows.clamp(0, len(q) - 1)
    return q.view(torch.uint8)[rows].view(q.dtype), s[rows]


def draws(rows: int, matrices: int) -> bool:
    """Whether CTAs draw their work tiles: of several matrices these take different times, if each has several."""
    return matrices > 1 and rows >= max(limits.DRAWN_ROWS, limits.DRAWN_ROWS_OF_A_MATRIX * matrices)


def tile_counter(like: torch.Tensor, drawn: bool) -> torch.Tensor | None:
    """What they draw from."""
    return torch.zeros(1, dtype=torch.int32, device=like.device) if drawn else None


def aligned_rows(q: torch.Tensor) -> torch.Tensor:
    """q [M, K] with its rows at multiples of 16 bytes."""
    aligned = rows_at_16_bytes(q)
    return q.clone(memory_format=torch.contiguous_format) if aligned is None else aligned


def aligned_scales(x: torch.Tensor) -> torch.Tensor:
    """x [..., G] as the kernel takes it: rows at multiples of 16 bytes, G a multiple of 4."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 4)) if x.shape[-1] % 4 else tma_rows(x)


@functools.lru_cache(4096)
def _choose_config(rows: int, columns: int, channels: int, sms: int) -> "Tile":
    """Choose the CTA tile for a product with one matrix. Its type says which of the two kernels runs."""
    from dsa.kernels.gemm.fp8_gemm_choice import choose_for_one_matrix

    return choose_for_one_matrix(rows, columns, channels, sms)


@functools.lru_cache(4096)
def _choose_grouped_config(
    rows: int, columns: int, channels: int, matrices: int, sms: int, gathered: bool, drawn: bool
) -> "Fp8GemmConfig":
    from dsa.kernels.gemm import fp8_gemm_config as configs

    sizes = rows, columns, channels, matrices, sms
    if drawn:
        return configs.choose_drawn_config(*sizes)
    return configs.choose_config(*sizes, configs.GATHERING_CONFIGS if gathered else configs.CONFIGS)


@functools.lru_cache(4096)
def _choose_grouped_few_rows_config(rows: int, matrices: int) -> "FewRowsConfig":
    from dsa.kernels.gemm.fp8_gemm_few_rows_config import choose_grouped_config

    return choose_grouped_config(rows, matrices)
