"""A norm, the cast of its result for the FP8 layers that read it, and in front of it the sum with a residual stream."""

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import dsa
from dsa.kernels.elementwise.limits import MAX_NORM_CAST_CHANNELS
from dsa_layers.batch.rows import ALL_ROWS, Rows
from dsa_layers.layers import joint_linear
from dsa_layers.layers.joint_linear import Cast, Layer
from dsa_layers.layers.norm import RMSNorm

MOST_CHANNELS = min(MAX_NORM_CAST_CHANNELS.values())  # that the kernels take, whatever the dtype


def norm_and_cast(
    norm: RMSNorm, x: torch.Tensor, layers: Sequence[Layer], residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, Cast | None]:
    """h = residual + x, or x without a residual -> (h, y = norm(h), the cast of y that `layers` share).

    x, residual [T, D]. The cast is None where the layers share none (`joint_linear.scaling`) and where gradients are
    on. Where there is one, h, y and the cast are one kernel's on a GPU, with the bits of the sum, the norm and the cast
    by themselves (`dsa.rms_norm_cast_to_fp8`).
    """
    use_ue8m0 = scaling(norm, x.shape[-1], layers) if x.dim() == 2 else None
    if use_ue8m0 is None:
        h = x if residual is None else residual + x
        return h, norm(h), None
    rest = norm.weight.float(), norm.eps, use_ue8m0
    if residual is None:
        y, *cast = dsa.rms_norm_cast_to_fp8(x, *rest)
        return x, y, tuple(cast)
    h, y, *cast = dsa.add_rms_norm_cast_to_fp8(x, residual, *rest)
    return h, y, tuple(cast)


def scaling(norm: RMSNorm, channels: int, layers: Sequence[Layer]) -> bool | None:
    """`use_ue8m0` of the cast that `layers` share, where a kernel is to make it together with the norm; else None."""
    use_ue8m0 = joint_linear.scaling(layers)
    return None if use_ue8m0 is None or not _is_plain(norm) or channels > MOST_CHANNELS else use_ue8m0


def cast_readers(module: nn.Module) -> tuple[Layer, ...]:
    """The layers of a module that read a cast of its input, if a call of it may be given one; else ()."""
    return joint_linear.joint_layers(module) if takes(module, "cast") else ()


def given(cast: Cast | None, rows: Rows = ALL_ROWS) -> dict[str, Any]:
    """A cast as the argument of a call, if there is one; and rows, where several processes have parts of the layers."""
    return ({} if cast is None else {"cast": cast}) | ({"rows": rows} if rows.parts else {})


def takes(module: nn.Module, argument: str) -> bool:
    """Whether a call of the module may have an argument that others in its place know nothing of: `forward` of its
    class has it, and nobody else does (`watched`). Not under torch.compile, which does not trace the question."""
    return not torch.compiler.is_compiling() and not watched(module) and _has(type(module), argument)


def watched(module: nn.Module) -> bool:
    """Whether a hook, or a `forward` of this module alone, sees or changes what goes in and comes out."""
    return bool(module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module))


@functools.cache
def _has(kind: type[nn.Module], argument: str) -> bool:
    return argument in inspect.signature(kind.forward).parameters


def _is_plain(norm: RMSNorm) -> bool:
    """Whether the formula is all that a call of the norm does, for inference."""
    return type(norm) is RMSNorm and not watched(norm) and not torch.is_grad_enabled()
