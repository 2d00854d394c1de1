"""Kimi delta attention with the Triton kernels of flash-linear-attention, if installed (the extra `kda`)."""

import functools
import warnings
from collections.abc import Sequence

import torch

from dsa_layers.batch import packing


@functools.cache
def installed() -> bool:
    """Return whether flash-linear-attention can be imported. If not, issue one warning per process."""
    try:
        import fla.modules.causal_conv1d
        import fla.ops.kda  # noqa: F401
    except ImportError as error:
        warnings.warn(
            f"Kimi delta attention runs in PyTorch, which is slow on a GPU: {error}. To use kernels, install the "
            "package fla-core",
            stacklevel=2,
        )
        return False
    return True


@functools.lru_cache(4)
def _bounds(lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return int64 [B + 1]: the first row of each sequence, then the number of rows.

    The kernels derive more indices from these bounds, for which the host waits for the GPU, and keep them for the same
    tensor. So all layers of a pass get one tensor.
    """
    return packing.offsets(lens, device).long()


def convolve(x: torch.Tensor, before: torch.Tensor, weight: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
    """Compute `dsa_layers.layers.kimi_delta_attention.convolve` with a kernel. The host may wait for the GPU (see
    `_bounds`)."""
    from fla.modules.causal_conv1d import causal_conv1d

    bounds = _bounds(tuple(lens), x.device)
    # The kernel expects one more earlier row than the convolution reads, so prepend a row of zeros.
    states = torch.nn.functional.pad(before, (0, 0, 1, 0)).transpose(1, 2).contiguous()
    y, _ = causal_conv1d(x[None], weight.squeeze(1), initial_state=states, activation="silu", cu_seqlens=bounds)
    return y[0]


def delta_rule(
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    lens: Sequence[int],
    states: torch.Tensor | None,
    lower_bound: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o [T, heads, dim] in qkv's dtype, states after each sequence in fp32), as `KimiDeltaAttention._recur`.

    qkv [T, 3, heads, dim]: q and k before they are normalised, and v. lower_bound: the lower bound of `decay`.
    """
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    q, k, v = (x.contiguous() for x in qkv.unbind(1))
    options = {"initial_state": states, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    if all(n == 1 for n in lens):  # one token per sequence, so the kernel needs no cu_seqlens
        out, last = fused_recurrent_kda(*(x[:, None] for x in (q, k, v, decay, beta)), **options)
        return out[:, 0], last
    bounds = _bounds(tuple(lens), qkv.device)
    options |= {"cu_seqlens": bounds, "safe_gate": lower_bound >= -5}
    out, last = chunk_kda(*(x[None] for x in (q, k, v, decay, beta)), **options)
    return out[0], last
