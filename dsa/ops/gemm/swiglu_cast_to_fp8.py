"""SwiGLU whose result is cast to FP8 for the projection behind it."""

import functools
from collections.abc import Callable

import torch

from dsa import backends
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import dtype_name
from dsa.reference.gemm import swiglu_cast_to_fp8 as reference

GROUP, CHANNEL_MULTIPLE = 128, 8


def swiglu_cast_to_fp8(
    gate: torch.Tensor, up: torch.Tensor, use_ue8m0: bool = True, *, limit: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """q = round_to_e4m3(h * (1 / scale)) of h = silu(gate) * up: `per_token_cast_to_fp8(h, use_ue8m0)` in one pass.

    gate, up   [..., I] bf16, fp16 or fp32, both of one dtype; the halves of a [..., 2 I] tensor are read where they are
    use_ue8m0  True: scale is the next power of two at or above max(amax(|h|), 1e-4) / 448; False: the figure itself
    limit      gate is at most that, up between -limit and limit, a finite number above 0; None: any

    h is computed in fp32 and rounded to the operands' dtype. Returns q [..., I] float8_e4m3fn and scale
    [..., ceil(I / 128)] float32, both contiguous; h ~ q * scale (the scale multiplies). The last block of channels may
    be ragged. NaN in a block makes its scale and values NaN, infinity in h makes the scale infinite, and silu(-inf) is
    NaN. Not differentiable. No rows or channels: empty results.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides, devices and limits.
    On Hopper: one kernel, I a multiple of 8, contiguous channels and rows at multiples of 16 bytes (the dimensions
    before the last mergeable into one). The fp32 value of h is within 2^-20 of the exact one, or 1e-36 * max(|up|, 1),
    before it is rounded; q and scale are then exactly the cast's bits on that GPU. CUDA-graph safe, no host
    synchronisation.
    Source: `Expert` and `act_quant` of DeepSeek-V3.2's inference code, the limit from DeepSeek-V4's.
    """
    if torch.compiler.is_compiling():
        return torch.ops.dsa.swiglu_cast_to_fp8(gate, up, use_ue8m0, limit)
    return _swiglu_cast(gate, up, use_ue8m0, limit)


def _swiglu_cast(
    gate: torch.Tensor, up: torch.Tensor, use_ue8m0: bool, limit: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    reference.check(gate, up, use_ue8m0, limit)
    if not backends.runs_kernel("swiglu_cast_to_fp8", gate):
        return reference.swiglu_cast_to_fp8(gate, up, use_ue8m0, limit=limit)
    channels = gate.shape[-1]
    if channels % CHANNEL_MULTIPLE:
        raise ValueError(f"gate: the Hopper kernel takes I a multiple of {CHANNEL_MULTIPLE}, got {list(gate.shape)}")
    q, scale = _allocate(gate)
    if gate.numel():
        operands = _as_rows("gate", gate), _as_rows("up", up)
        bound = None if limit is None else float(limit)
        launch = _kernel(gate.dtype, use_ue8m0, limit is not None, channels % GROUP != 0)
        with backends.on_device(gate):
            launch(*operands, q.view(-1, channels), scale.view(-1, scale.shape[-1]), bound)
    return q, scale


@functools.cache
def _kernel(dtype: torch.dtype, use_ue8m0: bool, limited: bool, ragged: bool) -> Callable[..., None]:
    from dsa.kernels.gemm.swiglu_cast_sm90 import compile_swiglu_cast

    return compile_swiglu_cast(dtype_name(dtype), use_ue8m0, limited, ragged)


def _allocate(gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.empty(gate.shape, dtype=torch.float8_e4m3fn, device=gate.device)
    blocks = -(-gate.shape[-1] // GROUP)
    return q, torch.empty((*gate.shape[:-1], blocks), dtype=torch.float32, device=gate.device)


def _as_rows(name: str, x: torch.Tensor) -> torch.Tensor:
    """x as [T, I] with rows that the kernel can read, without a copy, or a ValueError."""
    try:
        rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    except RuntimeError:
        raise ValueError(
            f"{name}: all dimensions before the last must be mergeable into one with a single stride, got shape "
            f"{list(x.shape)} with strides {list(x.stride())}; pass {name}.contiguous()"
        ) from None
    aligned = rows_at_16_bytes(rows)
    if aligned is None:
        raise ValueError(
            f"{name}: channels must be contiguous and rows start at multiples of 16 bytes, got strides "
            f"{list(x.stride())} and an address {x.data_ptr() % 16} bytes past one"
        )
    return aligned


torch.library.custom_op("dsa::swiglu_cast_to_fp8", mutates_args=())(_swiglu_cast)


@torch.library.register_fake("dsa::swiglu_cast_to_fp8")
def _(gate: torch.Tensor, up: torch.Tensor, use_ue8m0: bool, limit: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    reference.check(gate, up, use_ue8m0, limit)
    return _allocate(gate)
