"""Hyper-connections between two sublayers: `hyper_expand` and the next sublayer's `hyper_mix` in one
op."""

import torch

from dsa.kernels.elementwise.limits import EXPAND_MIX_TOKENS, MAX_EXPAND_MIX_OUTPUTS
from dsa.ops.elementwise import hyper_connections, hyper_mix
from dsa.ops.elementwise.hyper_mix import BF16
from dsa.reference.elementwise import hyper_expand_mix as reference
from dsa.runtime.declare import ALIGNED, F32, ROWS, Arguments, Tensor, op, rows_at_16_bytes

__all__ = ["hyper_expand_mix"]

HYPER_EXPAND_MIX = Arguments(
    limits=hyper_mix.HYPER_MIX.limits,
    y=Tensor("T D", BF16, layout=ROWS),
    streams=Tensor("T n D", BF16, layout=ROWS),
    post=Tensor("T n", F32, layout=ALIGNED),
    comb=Tensor("T n n", F32, optional=True, layout=ALIGNED),
    parts=Tensor("3 C n*D", BF16, layout=ALIGNED),
)


def hyper_expand_mix(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor | None, parts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """X' = `dsa.hyper_expand(y, streams, post, comb)`, the new streams, and mix = `dsa.hyper_mix(X', parts)`.

    y        [T, D] bf16: a sublayer's output
    streams  X [T, n, D] bf16
    post     [T, n] fp32
    comb     [T, n, n] fp32; None for independent streams
    parts    [3, C, n D] bf16: the projection of the next sublayer, as in `dsa.hyper_mix`

    Returns (X' [T, n, D] bf16, mix [T, C] fp32), contiguous, bit-identical to the results of the two functions.
    Differentiable: if a gradient is asked for, the formula runs in PyTorch.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel for up to 4 tokens if C is at most 131070, otherwise the kernels of the two functions. The
    limits are those of `hyper_expand` and `hyper_mix`. Deterministic; a token's results do not depend on the other
    tokens. CUDA-graph safe, no host synchronisation.
    Source: DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """
    return _hyper_expand_mix(y, streams, post, comb, parts)


def _results(streams: torch.Tensor, parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mix = torch.empty(streams.shape[0], parts.shape[1], dtype=torch.float32, device=streams.device)
    return torch.empty(streams.shape, dtype=streams.dtype, device=streams.device), mix


@op(
    arguments=HYPER_EXPAND_MIX,
    reference=reference.hyper_expand_mix,
    results=_results,
    limits=hyper_connections.LIMITS | hyper_mix.LIMITS,
    differentiable=True,
)
def _hyper_expand_mix(
    y: torch.Tensor,
    streams: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor | None,
    parts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.elementwise.hyper_expand_mix_sm90 import compile_hyper_expand_mix

    tokens = len(streams)
    if tokens > EXPAND_MIX_TOKENS[-1] or parts.shape[1] > MAX_EXPAND_MIX_OUTPUTS:
        new = hyper_connections._hyper_expand.launch_on(y.device, y, streams, post, comb)
        return new, hyper_mix._hyper_mix.launch_on(y.device, new, parts)
    new, mix = _results(streams, parts)
    if tokens:
        y, streams, post, parts = (rows_at_16_bytes(t) for t in (y, streams, post, parts))
        weights = None if comb is None else rows_at_16_bytes(comb.flatten(1))
        most = next(most for most in EXPAND_MIX_TOKENS if tokens <= most)
        compile_hyper_expand_mix(most, comb is not None)(y, streams, post, weights, parts, new, mix)
    return new, mix
