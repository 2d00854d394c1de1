"""Grouped matrix products of FP8 activations and FP4 weights, and what is made of FP4 weights, which is PyTorch by
design."""

import functools
from typing import TYPE_CHECKING

import torch

from dsa.kernels.gemm import limits
from dsa.ops._kernel_arguments import dtype_name
from dsa.ops.gemm import fp8_gemm_nt as fp8
from dsa.ops.gemm.fp8_gemm_nt import Scaled
from dsa.reference.gemm import fp4_cast
from dsa.reference.gemm import fp8_fp4_gemm_nt as reference
from dsa.reference.gemm.fp8_gemm_nt import pair
from dsa.runtime import backends
from dsa.runtime.op import op

if TYPE_CHECKING:
    from dsa.kernels.gemm.fp8_fp4_gemm_config import Fp8Fp4GemmConfig
    from dsa.kernels.gemm.fp8_fp4_gemm_few_rows_sm90 import Fp8Fp4GemmFewRowsConfig

__all__ = ["fp4_block_scales", "grouped_fp8_fp4_gemm_nt", "widen_fp4"]

fp4_block_scales = fp4_cast.fp4_block_scales
widen_fp4 = fp4_cast.widen_fp4

FP4Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Up to so many rows per matrix on average, the kernel that widens weights in registers is faster than the one that
# widens them in shared memory, for many rows at a time. Either takes any number.
FEW_ROWS = 24


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
    """`grouped_fp8_gemm_nt` with FP4 weights: bit by bit the product of the weights that `widen_fp4` makes of them.

    a              (q [A, K] e4m3, s [A, ceil(K / 128)] fp32): the activations and their scales
    b              (packed [E, N, K / 2] int8 or uint8, scale [E, N, K / 32] float8_e8m0fnu, block_scale
                   [E, ceil(N / 128), ceil(K / 128)] fp32): two e2m1 codes a byte, the low nibble the even channel;
                   the scale of 32 channels of a row; `fp4_block_scales(packed, scale)`. K is a multiple of 32
    ends           int32 [E], ascending from at least 0 to at most M; a weight may have no rows, and all of them none
    out_dtype      float32, bfloat16 or float16
    rows           int32 [M]: row m of the product is of row rows[m] of a, from 0 to A - 1; the same one may stand
                   several times. None: the rows of a as they are, M = A
    weights        fp32 [M]: out[m] = round(sums[m] * weights[m]), the product in fp32; None: 1
    expected_rows  how many rows are expected before ends[E - 1], from 0 to M, which decides nothing but how fast they
                   are computed: the bits are the same whatever it is, and `ends` may say anything else. None: M

    Returns [M, N]. A row's result depends on no other row. Rows from ends[E - 1] on belong to no
    expert: no product is computed for them, and their result is undefined, as in `grouped_fp8_gemm_nt`.
    The weights stay FP4:
    they become e4m3 only where the tensor cores read them, with the powers of two between a group's scale and its
    block's in the values.
    Raises TypeError or ValueError for other types, dtypes, shapes and devices, and where the reference runs, for ends
    and rows as `grouped_fp8_gemm_nt` does, and for block scales other than those of `fp4_block_scales`, which refuses
    blocks that e4m3 cannot hold. With other block scales the kernel's result is undefined.
    On Hopper: K a multiple of 32 and N of 8, E up to 1024, E N below 2^31, packed and scale contiguous from multiples
    of 16 bytes on; no host synchronisation. Every call copies the scales, those of the weights too, unless K is a
    multiple of 512. Kernel and work tiles are chosen for the expected rows: up to 24 a weight, on average, have a
    kernel of their own if K is a multiple of 128; of others a copy of `rows` of a is made before.
    Source: the experts of DeepSeek-V4's checkpoints, and its inference code.
    """
    operands = *pair("a", a), *reference.fp4_weight("b", b)
    return _grouped_fp8_fp4_gemm_nt(*operands, ends, out_dtype, rows, weights, expected_rows)


def _results(q: torch.Tensor, packed: torch.Tensor, out_dtype: torch.dtype, rows: torch.Tensor | None) -> torch.Tensor:
    return q.new_empty((len(q if rows is None else rows), packed.shape[1]), dtype=out_dtype)


def check_fp4_limits(q: torch.Tensor, packed: torch.Tensor, rows: torch.Tensor | None) -> None:
    """What the kernels do not take, of FP4 weights."""
    count = len(q if rows is None else rows)
    if len(packed) > limits.MAX_MATRICES:
        raise ValueError(f"b[0]: the kernel takes at most {limits.MAX_MATRICES} weights, got {len(packed)}")
    if count == 0 or packed.numel() == 0 or len(q) == 0:
        return
    if packed.shape[1] % limits.N_MULTIPLE:
        raise ValueError(
            f"b[0]: the kernel takes N that is a multiple of {limits.N_MULTIPLE}, got shape {list(packed.shape)}"
        )
    for name, most in (("a[0]", len(q)), ("rows", count)):
        if most > limits.MAX_ROWS:
            raise ValueError(f"{name}: the kernel takes at most {limits.MAX_ROWS} rows, got {most}")
    fp8.check_columns(packed)


@op(
    arguments=reference.GROUPED_FP8_FP4_GEMM_NT,
    reference=reference.grouped_fp8_fp4_gemm_nt,
    results=_results,
    limits=check_fp4_limits,
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
    """e8m0 scales [E, N, K / 32] as the kernels take them: bytes, so many a row that they are multiples of 16."""
    codes = scale.view(torch.uint8)
    return torch.nn.functional.pad(codes, (0, -codes.shape[-1] % 16)) if codes.shape[-1] % 16 else codes


@functools.lru_cache(4096)
def _choose_config(rows: int, columns: int, channels: int, matrices: int, sms: int) -> "Fp8Fp4GemmConfig":
    from dsa.kernels.gemm.fp8_fp4_gemm_config import choose_config

    return choose_config(rows, columns, channels, matrices, sms)


@functools.lru_cache(4096)
def _choose_few_rows_config(rows: int, columns: int, matrices: int, sms: int) -> "Fp8Fp4GemmFewRowsConfig":
    from dsa.kernels.gemm.fp8_fp4_gemm_few_rows_sm90 import choose_config

    return choose_config(rows, columns, matrices, sms)
