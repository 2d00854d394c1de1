"""Rotary position embedding of queries, keys or attention outputs."""

import torch

from dsa.kernels.elementwise.limits import MAX_ROTARY_GROUPS, ROTARY_PAIRS
from dsa.reference.elementwise import rotary as reference
from dsa.runtime.declare import (
    F32,
    FLOATS,
    INNER,
    Arguments,
    Choice,
    Flag,
    Tensor,
    at_least,
    dtype_name,
    op,
    rows_at_16_bytes,
    unit_inner,
    wants_gradient,
)

__all__ = ["apply_rotary"]


DIMS = ("first", "last")


def check_rotated(name: str, x: torch.Tensor, cos: torch.Tensor) -> None:
    """Raise ValueError if the argument `name` has fewer channels than cos and sin rotate."""
    if 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"{name}: the last dimension must be at least {2 * cos.shape[1]} for these cos and sin, got {x.shape[-1]}"
        )


def check_channels(x: torch.Tensor, cos: torch.Tensor) -> None:
    check_rotated("x", x, cos)


ROTARY = Arguments(
    rule=check_channels,
    x=Tensor("T ... D", FLOATS, layout=INNER, merged=(1, -1)),
    cos=Tensor("T R/2", F32),
    sin=Tensor("T R/2", F32),
    interleaved=Flag(),
    dims=Choice(DIMS),
)
OUT = {"out": Tensor("T ... D", FLOATS, like="x", layout=INNER, merged=(1, -1))}


def apply_rotary(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    dims: str = "first",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the first or last R = 2 * cos.shape[-1] channels of x; copy the others.

    (a, b) -> (a cos - b sin, a sin + b cos) on pairs of channels, in fp32, rounded once to x's dtype.

    x            [T, ..., D] bf16, fp16 or fp32
    cos, sin     [T, R / 2] fp32, R at most D, for the tokens' positions. With -sin in place of sin the op applies the
                 inverse rotation
    interleaved  True: the pairs are (2i, 2i + 1); False: (i, i + R / 2). The pairing must be the one that the model was
                 trained with: True for MLA of DeepSeek-V3.2, False for its indexer. No check notices a wrong pairing
    dims         which R channels are rotated: the "first" or the "last"
    out          None, or the tensor to write to, with x's shape, dtype and device and rows at any stride, such as a
                 slice of a wider tensor. It may be x itself; then the op does not touch the channels that it does not
                 rotate. If out overlaps x in any other way, the result is undefined

    Returns out, or a new contiguous tensor. Differentiable in x if out is None: the backward pass applies the inverse
    rotation to the gradient.
    Raises TypeError or ValueError for other types, dtypes and shapes, and for a tensor `out` if gradients are asked
    for.
    On Hopper: one kernel, bit-identical to the reference. R at least 2; D even (in place any D); last dimensions of x
    and out contiguous; all dimensions between T and D mergeable into one. Fast for rows at multiples of 16 bytes with R
    and D multiples of 8; other rows are read one channel at a time. cos and sin are copied if the kernel cannot read
    their layout. Only the reference computes gradients of cos and sin. CUDA-graph safe, no host synchronisation.
    Source: RoFormer (arXiv 2104.09864); `apply_rotary_emb` of DeepSeek-V3.2's and V4's inference code.
    """
    wants_gradients = torch.is_grad_enabled() and wants_gradient(x, cos, sin, out)
    if wants_gradients:
        ROTARY.check(x, cos, sin, interleaved, dims)
    if out is not None:
        if wants_gradients:
            raise ValueError("out: must be None where gradients of x, cos, sin or out are asked for; use no_grad")
        _apply_rotary.into(x, cos, sin, interleaved, dims, out)
        return out
    if wants_gradients and (torch.compiler.is_compiling() or _apply_rotary.runs_kernel(x)):
        if wants_gradient(cos, sin):
            raise ValueError("cos: the gradients of cos and sin are the reference's only; use dsa.use_backend")
        return torch.ops.dsa.apply_rotary(x, cos, sin, interleaved, dims)  # the registered op has a backward pass
    return _apply_rotary(x, cos, sin, interleaved, dims)


def _results(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _check_rows(x: torch.Tensor, cos: torch.Tensor, dims: str, out: torch.Tensor | None) -> None:
    if out is None:
        out = x  # the new tensor allows groups of 8 channels if x does
    else:
        x, out, _ = _rotated_parts(x, cos, dims, out)
    if x.shape[-1] % 2:
        raise ValueError(f"x: the kernel takes an even last dimension, got shape {list(x.shape)}")
    channels = 2 if _wide(x, out, 2 * cos.shape[1]) is None else 2 * ROTARY_PAIRS
    if x.numel() // channels > MAX_ROTARY_GROUPS:
        raise ValueError(
            f"x: the kernel takes at most {MAX_ROTARY_GROUPS * channels} numbers in rows like these, got shape "
            f"{list(x.shape)}"
        )


@op(
    arguments=ROTARY,
    reference=reference.apply_rotary,
    results=_results,
    limits={"R/2": at_least(1)},
    rule=_check_rows,
    out=OUT,
)
def _apply_rotary(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, dims: str, out: torch.Tensor | None
) -> torch.Tensor:
    from dsa.kernels.elementwise.rotary_sm90 import choose_config, compile_apply_rotary

    result = _results(x) if out is None else out
    if not x.numel():
        return result
    x, target, begin = _rotated_parts(x, cos, dims, result)
    rows, target = _heads(x), _heads(target)
    wide = _wide(rows, target, 2 * cos.shape[1])
    if wide is not None:
        rows, target = wide
    channels = 2 * ROTARY_PAIRS if wide is not None else 2
    angles = (_angles(a, wide is not None) for a in (cos, sin))
    name = dtype_name(x.dtype)
    launch = compile_apply_rotary(name, interleaved, choose_config(name, wide is not None, x.numel()))
    launch(rows, *angles, target, begin // channels)
    return result


def _rotated_parts(
    x: torch.Tensor, cos: torch.Tensor, dims: str, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return views of x and out for the kernel, and the first rotated channel in them. If out is x, they contain only
    the rotated channels."""
    rotated = 2 * cos.shape[1]
    begin = x.shape[-1] - rotated if dims == "last" else 0
    if x.data_ptr() == out.data_ptr() and x.stride() == out.stride():
        return x[..., begin : begin + rotated], out[..., begin : begin + rotated], 0
    return x, out, begin


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 3 else x.view(x.shape[0], -1, x.shape[-1])


def _wide(x: torch.Tensor, out: torch.Tensor, rotated: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (x, out) for the kernel that accesses groups of 8 channels, or None if it cannot access them."""
    if x.shape[-1] % (2 * ROTARY_PAIRS) or rotated % (2 * ROTARY_PAIRS):
        return None
    x, out = rows_at_16_bytes(x), rows_at_16_bytes(out)
    return None if x is None or out is None else (x, out)


def _angles(x: torch.Tensor, wide: bool) -> torch.Tensor:
    """Return x (cos or sin), copied if the kernel cannot read its layout. wide: whether the kernel accesses groups of 8
    channels"""
    given = rows_at_16_bytes(x) if wide else unit_inner(x)
    if given is None or given.stride(1) != 1:
        return x.clone(memory_format=torch.contiguous_format)
    return given


def _save_angles(ctx, inputs: tuple, output: torch.Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.dims = inputs
    ctx.save_for_backward(cos, sin)


def _rotate_back(ctx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    # The registered op can be traced, and this function differentiates it, too.
    back = torch.ops.dsa.apply_rotary(grad.contiguous(), cos, -sin, ctx.interleaved, ctx.dims)
    return back, None, None, None, None


torch.library.register_autograd("dsa::apply_rotary", _rotate_back, setup_context=_save_angles)
