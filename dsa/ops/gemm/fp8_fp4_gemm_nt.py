"""Grouped products of FP8 activations and FP4 weights, and casts of FP4 weights. The casts run in PyTorch on every
device."""

import functools
from typing import TYPE_CHECKING

import torch

from dsa.kernels.gemm import limits
from dsa.ops.gemm import fp8_gemm_nt as fp8
from dsa.ops.gemm._operands import check_rows, fp4_weight, pair
from dsa.ops.gemm.fp8_gemm_nt import Scaled
from dsa.reference.gemm import fp4_cast
from dsa.reference.gemm import fp8_fp4_gemm_nt as reference
from dsa.runtime import backends
from dsa.runtime.declare import (
    ALIGNED,
    E4M3,
    F32,
    FLOATS,
    INT32,
    Arguments,
    Dtype,
    Int,
    Tensor,
    check_memory,
    dtype_name,
    op,
)

if TYPE_CHECKING:
    from dsa.kernels.gemm.fp8_fp4_gemm_few_rows_sm90 import Fp8Fp4GemmFewRowsConfig
    from dsa.kernels.gemm.fp8_fp4_gemm_sm90 import Fp8Fp4GemmConfig

__all__ = ["fp4_block_scales", "grouped_fp8_fp4_gemm_nt", "widen_fp4"]

BYTES = (torch.int8, torch.uint8)
E8M0 = (torch.float8_e8m0fnu,)

FP4Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Up to FEW_ROWS expected rows per matrix, fp8_fp4_gemm_few_rows_sm90.py is faster than fp8_fp4_gemm_sm90.py.
FEW_ROWS = 24


def check_groups(name: str, packed: torch.Tensor) -> None:
    channels = 2 * packed.shape[-1]
    if channels % fp4_cast.GROUP:
        raise ValueError(
            f"{name}: must have a multiple of {fp4_cast.GROUP} channels, two a byte, got {channels} channels"
        )


FP4_WEIGHT = Arguments(
    packed=Tensor("... N C", BYTES, rule=check_groups),
    scale=Tensor("... N ceil(C/16)", E8M0),
)
OPERANDS = {
    "q": Tensor("A 2*C", E4M3, name="a[0]"),
    "s": Tensor("A ceil(C/64) | A 4*ceil(C/256)", F32, name="a[1]"),
    "packed": Tensor("E N C", BYTES, layout=ALIGNED, name="b[0]", rule=check_groups),
    "scale": Tensor("E N ceil(C/16)", E8M0, layout=ALIGNED, name="b[1]"),
    "block_scale": Tensor("E ceil(N/128) ceil(C/64)", F32, name="b[2]"),
}
GROUPED_FP8_FP4_GEMM_NT = Arguments(
    rule=check_rows,
    first=("packed", "scale", "block_scale"),
    **OPERANDS,
    ends=Tensor("E", INT32),
    out_dtype=Dtype(FLOATS),
    rows=Tensor("M", INT32, optional=True),
    weights=Tensor("M", F32, optional=True),
    expected_rows=Int(least=0, optional=True),
)
LIMITS = {name: accepted for name, accepted in fp8.GROUPED_LIMITS.items() if name != "K"}


def fp4_block_scales(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The FP8 scale of each 128 x 128 block of an FP4 weight: 2^-6 times the largest scale of the block's groups.

    packed  [..., N, K / 2] int8 or uint8: two e2m1 codes a byte, the low nibble the even channel; K a multiple of 32
    scale   [..., N, K / 32] float8_e8m0fnu: one scale per 32 channels of a row

    Groups whose values are all zero are ignored. A block whose values are all zero gets 2^-126, the lowest scale.
    Returns [..., ceil(N / 128), ceil(K / 128)] fp32: the scale of `widen_fp4`, and the block_scale of
    `grouped_fp8_fp4_gemm_nt`. The last block of a row or column of blocks may be smaller.
    Raises TypeError or ValueError for other types, dtypes and shapes, for a NaN scale, and for a block whose largest
    group scale is more than 2^14 times the smallest, because e4m3 cannot represent such a block with one scale. The
    message names the block and the factor.
    """
    return widen_fp4(packed, scale)[1]


def widen_fp4(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert an FP4 weight to FP8 exactly: q * s = e2m1 * scale, where s is 2^-6 times the largest scale of a block's
    groups.

    packed  [..., N, K / 2] int8 or uint8: two e2m1 codes a byte, the low nibble the even channel; K a multiple of 32
    scale   [..., N, K / 32] float8_e8m0fnu: one scale per 32 channels of a row

    Returns q [..., N, K] float8_e4m3fn and s [..., ceil(N / 128), ceil(K / 128)] fp32, the `fp4_block_scales`: a weight
    for `fp8_gemm_nt` and `grouped_fp8_gemm_nt`.
    Raises TypeError or ValueError like `fp4_block_scales`.
    """
    FP4_WEIGHT.check(packed, scale)
    check_memory("packed", packed)
    return fp4_cast.widen_fp4(packed, scale)


def grouped_fp8_fp4_gemm_nt(
    a: Scaled,
    b: FP4Weights,
    ends: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    rows: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """`grouped_fp8_gemm_nt` with FP4 weights: the same bits as with the weights that `widen_fp4` returns.

    a              (q [A, K] e4m3, s [A, ceil(K / 128)] fp32): activations and their scales
    b              (packed [E, N, K / 2] int8 or uint8, scale [E, N, K / 32] float8_e8m0fnu, block_scale
                   [E, ceil(N / 128), ceil(K / 128)] fp32). packed has two e2m1 codes a byte, the low nibble for the
                   even channel; scale has one number per 32 channels of a row; block_scale is `fp4_block_scales(packed,
                   scale)`. K is a multiple of 32
    ends           int32 [E], ascending from at least 0 to at most M: where the rows of each weight end. One, several or
                   all weights may have no rows
    out_dtype      float32, bfloat16 or float16
    rows           int32 [M]: row m of the product uses row rows[m] of a, from 0 to A - 1; a row may be used several
                   times. None: the rows of a in order, M = A
    weights        fp32 [M]: out[m] = round(sums[m] * weights[m]), multiplied in fp32 and rounded once; None: 1
    expected_rows  what the caller expects ends[E - 1] to be, from 0 to M. It changes the speed but no bit of the
                   result; ends[E - 1] may differ. None: M

    Returns [M, N]. A row's result depends on no other row. Rows from ends[E - 1] on belong to no expert: no product is
    computed for them, and their result is undefined, as in `grouped_fp8_gemm_nt`. The weights stay FP4 in memory. The
    kernel widens them to e4m3 for the tensor cores and multiplies the values by the ratio of their group's scale to the
    block's scale.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices. The reference also raises ValueError for
    invalid ends and rows, as that of `grouped_fp8_gemm_nt` does, and for block scales other than those of
    `fp4_block_scales`, which refuses blocks that e4m3 cannot represent. With other block scales the kernel's result is
    undefined.
    On Hopper: K a multiple of 32, N a multiple of 8, E up to 1024, E N below 2^31; packed and scale contiguous,
    starting at a multiple of 16 bytes; no host synchronisation. Every call copies the scales of a and b unless K is a
    multiple of 512. The op chooses the kernel and the work tiles by the expected rows: a small-M kernel runs for up to
    24 per weight on average if K is a multiple of 128. Otherwise, if `rows` is given, the call first copies these rows
    of a.
    Source: the experts of DeepSeek-V4's checkpoints, and DeepSeek-V4's inference code.
    """
    operands = *pair("a", a), *fp4_weight("b", b)
    return _grouped_fp8_fp4_gemm_nt(*operands, ends, out_dtype, rows, weights, expected_rows)


def _results(q: torch.Tensor, packed: torch.Tensor, out_dtype: torch.dtype, rows: torch.Tensor | None) -> torch.Tensor:
    return q.new_empty((len(q if rows is None else rows), packed.shape[1]), dtype=out_dtype)


@op(
    arguments=GROUPED_FP8_FP4_GEMM_NT,
    reference=reference.grouped_fp8_fp4_gemm_nt,
    results=_results,
    limits=LIMITS,
)
def _grouped_fp8_fp4_gemm_nt(
    q: torch.Tensor,
    s: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor,
    block_scale: torch.Tensor,
    ends: torch.Tensor,
    out_dtype: torch.dtype,
    rows: torch.Tensor | None,
    weights: torch.Tensor | None,
    expected_rows: int | None,
) -> torch.Tensor:
    from dsa.kernels.gemm.fp8_fp4_gemm_few_rows_sm90 import compile_fp8_fp4_gemm_few_rows
    from dsa.kernels.gemm.fp8_fp4_gemm_sm90 import compile_fp8_fp4_gemm

    out = _results(q, packed, out_dtype, rows)
    (matrices, columns), channels, count = packed.shape[:2], q.shape[1], len(out)
    if channels == 0 or len(q) == 0:
        out.zero_()
    if out.numel() == 0 or channels == 0 or matrices == 0 or len(q) == 0:
        return out
    sms, dtype = backends.num_sms(q.device), dtype_name(out_dtype)
    codes = packed.view(torch.uint8).view(-1, channels // 2)
    factors = None if weights is None else weights.contiguous()
    expected = fp8.rows_to_choose_for(count, expected_rows)
    if expected <= FEW_ROWS * matrices and channels % limits.GROUP == 0:
        config = _choose_few_rows_config(expected, columns, matrices, sms)
        launch = compile_fp8_fp4_gemm_few_rows(dtype, config)
        sources = q.new_empty(0, dtype=torch.int32) if rows is None else rows.contiguous()
        a = fp8.aligned_rows(q), fp8.aligned_scales(s), sources
        b = codes, _group_scales(scale), fp8.aligned_scales(block_scale)
        factors = s.new_empty(0) if factors is None else factors
        launch(*a, *b, ends.contiguous(), factors, out, config.ctas(sms))
        return out
    q, s = fp8.copied_rows(q, s, rows)
    config = _choose_config(expected, columns, channels, matrices, sms)
    launch = compile_fp8_fp4_gemm(dtype, config, weights is not None)
    a, b = (fp8.aligned_rows(q), fp8.aligned_scales(s)), (codes, _group_scales(scale).flatten(0, 1))
    of_blocks = fp8.aligned_scales(block_scale).permute(1, 2, 0)
    launch(*a, *b, of_blocks, ends.contiguous(), out, factors, sms)
    return out


def _group_scales(scale: torch.Tensor) -> torch.Tensor:
    """Return e8m0 scales [E, N, K / 32] as bytes, with rows padded to a multiple of 16 bytes."""
    codes = scale.view(torch.uint8)
    return torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 16)) if codes.shape[-1] % 16 else codes


@functools.lru_cache(4096)
def _choose_config(rows: int, columns: int, channels: int, matrices: int, sms: int) -> "Fp8Fp4GemmConfig":
    from dsa.kernels.gemm.fp8_fp4_gemm_sm90 import choose_config

    return choose_config(rows, columns, channels, matrices, sms)


@functools.lru_cache(4096)
def _choose_few_rows_config(rows: int, columns: int, matrices: int, sms: int) -> "Fp8Fp4GemmFewRowsConfig":
    from dsa.kernels.gemm.fp8_fp4_gemm_few_rows_sm90 import choose_config

    return choose_config(rows, columns, matrices, sms)
