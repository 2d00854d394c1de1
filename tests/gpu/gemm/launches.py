"""Functions that launch an FP8 or FP4 GEMM kernel with a given configuration. The "few" kernel is the small-M kernel;
several matrices are "grouped"."""

import torch

import dsa
from dsa.kernels.gemm import fp8_fp4_gemm_few_rows_sm90 as fp4_few_rows_kernels
from dsa.kernels.gemm import fp8_fp4_gemm_sm90 as fp4_kernels
from dsa.kernels.gemm import fp8_gemm_few_rows_sm90 as few_rows_kernels
from dsa.kernels.gemm import fp8_gemm_sm90 as kernels
from dsa.ops.gemm import fp8_fp4_gemm_nt as fp4
from dsa.ops.gemm import fp8_gemm_nt as fp8
from dsa.runtime.checks import dtype_name


def weights_and_scales(b):
    """Return (weights, scales) in the layouts of the grouped kernels: weights [E * N, K], scales [N / 128, K / 128, E]
    (numbers of blocks, rounded up)."""
    w, ws = b
    return w.view(-1, w.shape[-1]), fp8.aligned_scales(ws).permute(1, 2, 0)


def write_few(config, a, b, out):
    (q, s), (w, ws) = a, b
    few_rows_kernels.compile_fp8_gemm_few_rows(dtype_name(out.dtype), config)(
        q, fp8.aligned_scales(s), w, fp8.aligned_scales(ws[None]), out, dsa.num_sms(out.device)
    )


def write_one(config, a, b, out, ctas=None):
    (q, s), (w, ws) = a, b
    scales = fp8.aligned_scales(ws[None]).permute(1, 2, 0)
    kernels.compile_fp8_gemm(dtype_name(out.dtype), config)(
        q, fp8.aligned_scales(s), w, scales, out, ctas or dsa.num_sms(q.device)
    )


def write_few_grouped(config, a, b, ends, out, ctas=None):
    (q, s), (w, ws) = a, b
    few_rows_kernels.compile_grouped_fp8_gemm_few_rows(dtype_name(out.dtype), config)(
        *(q, fp8.aligned_scales(s), w.view(-1, w.shape[-1]), fp8.aligned_scales(ws), out, ends),
        ctas or dsa.num_sms(out.device),
    )


def write_grouped(config, a, b, ends, out, rows=None, weights=None, is_dynamic=False, ctas=None):
    q, s = a
    variant = config, rows is not None, weights is not None, is_dynamic
    kernels.compile_grouped_fp8_gemm(dtype_name(out.dtype), *variant)(
        *(q, fp8.aligned_scales(s), rows, *weights_and_scales(b), ends),
        *(out, weights, None, fp8.tile_counter(q, is_dynamic), ctas or dsa.num_sms(q.device)),
    )


def write_swiglu(
    config, a, b, ends, q, scale, variant=(torch.bfloat16, True, None), rows=None, is_dynamic=False, ctas=None
):
    (x, s), (dtype, use_ue8m0, limit) = a, variant
    kind = use_ue8m0, limit is not None, config, rows is not None, is_dynamic
    kernels.compile_fp8_gemm_swiglu(dtype_name(dtype), *kind)(
        *(x, fp8.aligned_scales(s), rows, *weights_and_scales(b), ends),
        *(q, scale, limit, fp8.tile_counter(q, is_dynamic), ctas or dsa.num_sms(q.device)),
    )


def write_fp4(config, a, b, ends, out, rows=None, weights=None):
    (q, s), (packed, scale, block_scale) = a, b
    codes = packed.view(torch.uint8).view(-1, packed.shape[-1])
    group_scales, of_blocks = fp4._group_scales(scale), fp8.aligned_scales(block_scale)
    sms = dsa.num_sms(out.device)
    if config in fp4_few_rows_kernels.CONFIGS:
        empty = q.new_empty(0, dtype=torch.int32), s.new_empty(0)
        rows, weights = (none if x is None else x for x, none in zip((rows, weights), empty))
        fp4_few_rows_kernels.compile_fp8_fp4_gemm_few_rows(dtype_name(out.dtype), config)(
            *(q, fp8.aligned_scales(s), rows, codes, group_scales, of_blocks, ends, weights, out), config.ctas(sms)
        )
        return
    q, s = fp8.copied_rows(q, s, rows)
    fp4_kernels.compile_fp8_fp4_gemm(dtype_name(out.dtype), config, weights is not None)(
        *(q, fp8.aligned_scales(s), codes, group_scales.flatten(0, 1), of_blocks.permute(1, 2, 0), ends, out, weights),
        sms,
    )
