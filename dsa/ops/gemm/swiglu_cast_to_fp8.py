"""SwiGLU, or a sigmoid gate, and the FP8 cast of the result, for the next product."""

from collections.abc import Callable
from functools import partial

import torch

from dsa.kernels.gemm.limits import GROUP, SWIGLU_MULTIPLE
from dsa.ops.gemm._operands import scale_columns, without_padding
from dsa.reference.gemm import swiglu_cast_to_fp8 as reference
from dsa.runtime import backends
from dsa.runtime.declare import (
    FLOATS,
    POSITIVE,
    ROWS,
    Arguments,
    Flag,
    Number,
    Tensor,
    dtype_name,
    multiple_of,
    op,
    rows_at_16_bytes,
    with_dims,
)

__all__ = ["gate_cast_to_fp8", "swiglu_cast_to_fp8"]


SWIGLU_CAST_TO_FP8 = Arguments(
    limits={"limit": POSITIVE},
    gate=Tensor("... I", FLOATS, layout=ROWS, merged=(0, -1)),
    up=Tensor("... I", FLOATS, like="gate", layout=ROWS, merged=(0, -1)),
    use_ue8m0=Flag(),
    limit=Number(optional=True),
    pad_scales=Flag(),
)
GATE_CAST_TO_FP8 = Arguments(
    gate=Tensor("... I", FLOATS, layout=ROWS, merged=(0, -1)),
    x=Tensor("... I", FLOATS, like="gate", layout=ROWS, merged=(0, -1)),
    use_ue8m0=Flag(),
    pad_scales=Flag(),
)
LIMITS = {"I": multiple_of(SWIGLU_MULTIPLE)}


def swiglu_cast_to_fp8(
    gate: torch.Tensor,
    up: torch.Tensor,
    use_ue8m0: bool = True,
    *,
    limit: float | None = None,
    pad_scales: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = round_to_e4m3(h * (1 / scale)) with h = silu(gate) * up: `per_token_cast_to_fp8(h, use_ue8m0)` in one pass.

    gate, up   [..., I] bf16, fp16 or fp32, of the same dtype; they may be the halves of a [..., 2 I] tensor
    use_ue8m0  True: a scale is max(amax(|h|), 1e-4) / 448, rounded up to a power of two; False: it is not rounded up
    limit      a finite number above 0: first gate = min(gate, limit) and up = clamp(up, -limit, limit). None: no clamp
    pad_scales  True: scale has 4 ceil(I / 512) columns, of which the added ones are those of zeros. `dsa.fp8_gemm_nt`
                reads such scales without a copy

    h is computed in fp32 and rounded to the operands' dtype. Returns q [..., I] float8_e4m3fn and scale
    [..., ceil(I / 128)] float32, both contiguous; h ~ q * scale (the scale multiplies). The last block of channels may
    have fewer than 128. NaN in a block makes its scale and values NaN, infinity in h makes the scale infinite, and
    silu(-inf) is NaN. Not differentiable. Without rows or channels the results are empty.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides, devices and limits.
    On Hopper: one kernel, I a multiple of 8, contiguous channels and rows at multiples of 16 bytes (the dimensions
    before the last mergeable into one). The fp32 value of h has a relative error of at most 2^-20, or an absolute error
    of at most 1e-36 * max(|up|, 1). q and scale are computed from the rounded h, with the bits of
    `per_token_cast_to_fp8` on the same GPU. CUDA-graph safe, no host synchronisation.
    Source: `Expert` and `act_quant` of DeepSeek-V3.2's inference code, the limit from DeepSeek-V4's.
    """
    return _swiglu_cast_to_fp8(gate, up, use_ue8m0, limit, pad_scales)


def gate_cast_to_fp8(
    gate: torch.Tensor, x: torch.Tensor, use_ue8m0: bool = True, *, pad_scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = round_to_e4m3(h * (1 / scale)) with h = sigmoid(gate) * x: `per_token_cast_to_fp8(h, use_ue8m0)` in one pass.

    gate, x    [..., I] bf16, fp16 or fp32, of the same dtype
    use_ue8m0, pad_scales  as in `dsa.swiglu_cast_to_fp8`

    Results, errors, limits and bits are those of `dsa.swiglu_cast_to_fp8` with this h and without a limit; the absolute
    error of h is at most 1e-36 * |x|, and sigmoid(-inf) is 0.
    Source: the gate of Hy4's attention, `HYV4Attention` of transformers 5.
    """
    return _gate_cast_to_fp8(gate, x, use_ue8m0, pad_scales)


def _results(gate: torch.Tensor, pad_scales: bool) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.empty(gate.shape, dtype=torch.float8_e4m3fn, device=gate.device)
    blocks = scale_columns(gate.shape[-1], pad_scales)
    return q, torch.empty((*gate.shape[:-1], blocks), dtype=torch.float32, device=gate.device)


@op(
    arguments=SWIGLU_CAST_TO_FP8,
    reference=reference.swiglu_cast_to_fp8,
    results=_results,
    limits=LIMITS,
)
def _swiglu_cast_to_fp8(
    gate: torch.Tensor, up: torch.Tensor, use_ue8m0: bool, limit: float | None, pad_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.gemm.swiglu_cast_sm90 import compile_swiglu_cast

    kind = dtype_name(gate.dtype), use_ue8m0, limit is not None
    bound = None if limit is None else float(limit)
    return _launch(partial(compile_swiglu_cast, *kind), gate, up, bound, pad_scales)


@op(arguments=GATE_CAST_TO_FP8, reference=reference.gate_cast_to_fp8, results=_results, limits=LIMITS)
def _gate_cast_to_fp8(
    gate: torch.Tensor, x: torch.Tensor, use_ue8m0: bool, pad_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.gemm.swiglu_cast_sm90 import compile_gate_cast

    return _launch(partial(compile_gate_cast, dtype_name(gate.dtype), use_ue8m0), gate, x, None, pad_scales)


def _launch(
    compile_cast: Callable[[bool], Callable[..., None]],
    gate: torch.Tensor,
    up: torch.Tensor,
    limit: float | None,
    pad_scales: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """compile_cast: takes whether a row has groups with fewer than 128 channels, and returns the kernel. Groups that
    only pad the scales have no channels."""
    q, scale = _results(gate, pad_scales)
    if gate.numel():
        channels = gate.shape[-1]
        operands = rows_at_16_bytes(with_dims(gate, 2)), rows_at_16_bytes(with_dims(up, 2))
        results = q.view(-1, channels), scale.view(-1, scale.shape[-1])
        compile_cast(channels != scale.shape[-1] * GROUP)(*operands, *results, limit)
    return q, scale


def cast_of_matrices(
    gate_up: torch.Tensor, ends: torch.Tensor, use_ue8m0: bool, limit: float | None, pad_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply `swiglu_cast_to_fp8` to the halves of a grouped product [M, 2 I], I a multiple of 128.

    For more than one wave of CTAs a persistent kernel runs, which skips the rows from ends[E - 1] on.
    """
    from dsa.kernels.gemm import swiglu_cast_sm90 as kernel

    gate, up = gate_up.chunk(2, -1)
    ctas = kernel.RESIDENT * backends.num_sms(gate.device)
    if gate.numel() <= ctas * kernel.GROUPS_PER_CTA * GROUP or not len(ends):
        return _swiglu_cast_to_fp8.launch_on(gate.device, gate, up, use_ue8m0, limit, pad_scales)
    q, scale = _results(gate, pad_scales)
    launch = kernel.compile_swiglu_cast_of_matrices(dtype_name(gate.dtype), use_ue8m0, limit is not None)
    launch(
        gate,
        up,
        q,
        without_padding(scale, gate.shape[1]),
        None if limit is None else float(limit),
        ends.contiguous(),
        ctas,
    )
    return q, scale
