"""Hyper-connections: from residual streams to a sublayer's input, and from the sublayer's output to new streams. The
streams of DeepSeek-V4 are mixed by a matrix; those of Hy4 are independent."""

import math

import torch

from dsa.kernels.elementwise.limits import CHANNEL_MULTIPLE, HYPER_STREAMS, HYPER_TILES, MAX_HYPER_CHANNELS
from dsa.reference.elementwise import hyper_connections as reference
from dsa.runtime.declare import (
    ALIGNED,
    CONTIGUOUS,
    F32,
    FLOATS,
    ROWS,
    Arguments,
    Int,
    Number,
    Tensor,
    at_least,
    at_most,
    dtype_name,
    multiple_of,
    op,
    rows_at_16_bytes,
)

__all__ = ["hyper_collapse", "hyper_collapse_independent", "hyper_expand", "hyper_head"]

MOST_ITERATIONS = 1000  # more than Sinkhorn needs to converge
STREAMS = {"n": at_least(1), "D": at_least(1)}
HYPER_COLLAPSE = Arguments(
    limits=STREAMS,
    streams=Tensor("T n D", FLOATS, layout=ROWS),
    mix=Tensor("T (2+n)*n", F32, layout=ALIGNED),
    base=Tensor("(2+n)*n", F32, layout=ALIGNED),
    scale=Tensor("3", F32, layout=CONTIGUOUS),
    iterations=Int(most=MOST_ITERATIONS),
    eps=Number(least=0),
    hc_eps=Number(least=0),
)
HYPER_COLLAPSE_INDEPENDENT = Arguments(
    limits=STREAMS,
    streams=Tensor("T n D", FLOATS, layout=ROWS),
    mix=Tensor("T 2*n", F32, layout=ALIGNED),
    base=Tensor("2*n", F32, layout=ALIGNED),
    scale=Tensor("2", F32, layout=CONTIGUOUS),
    magnitude=Number(),
    eps=Number(least=0),
    hc_eps=Number(least=0),
)
HYPER_HEAD = Arguments(
    limits=STREAMS,
    streams=Tensor("T n D", FLOATS, layout=ROWS),
    mix=Tensor("T n", F32, layout=ALIGNED),
    base=Tensor("n", F32, layout=ALIGNED),
    scale=Tensor("1", F32, layout=CONTIGUOUS),
    eps=Number(least=0),
    hc_eps=Number(least=0),
)
HYPER_EXPAND = Arguments(
    limits=STREAMS,
    y=Tensor("T D", FLOATS, layout=ROWS),
    streams=Tensor("T n D", FLOATS, like="y", layout=ROWS),
    post=Tensor("T n", F32, layout=ALIGNED),
    comb=Tensor("T n n", F32, optional=True, layout=ALIGNED),
)
LIMITS = {"n": (HYPER_STREAMS,), "D": multiple_of(CHANNEL_MULTIPLE), "T*D": at_most(MAX_HYPER_CHANNELS)}
COLLAPSE_LIMITS = LIMITS | {"D*itemsize": at_most(16 * math.prod(HYPER_TILES[-1]))}


def hyper_collapse(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    iterations: int = 20,
    eps: float = 1e-6,
    hc_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x = sum_k pre_k X_k, and the weights with which `hyper_expand` makes the new streams.

    v is the concatenation of a token's n streams, and z = mix / sqrt(mean(v^2) + eps). z * scale + base consists of n
    numbers a, then n numbers b, then a matrix c [n, n]:
      pre  = sigmoid(a) + hc_eps
      post = 2 sigmoid(b)
      comb = Sinkhorn(softmax(c) + hc_eps), with the softmax over each row
    Sinkhorn divides every column by its sum plus hc_eps. Then it repeats `iterations` - 1 times: it divides every row
    by its sum plus hc_eps, and then every column.

    streams  X [T, n, D] fp32, bf16 or fp16
    mix      [T, (2 + n) n] fp32: a linear projection of v
    base     [(2 + n) n] fp32
    scale    [3] fp32: one for a, one for b and one for c
    iterations   from 1 to 1000
    eps, hc_eps  finite numbers, at least 0

    Returns x [T, D] in streams' dtype, post [T, n] and comb [T, n, n] fp32, contiguous. Everything is computed in fp32,
    and x is rounded once. NaN and infinities stay in their token. Differentiable: if a gradient is asked for, the
    formula runs in PyTorch.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel. n = 4; D a multiple of 8 and at most 16384 (fp32: 8192); T D at most 2^33 - 2^13; rows of
    streams at multiples of 16 bytes; the other tensors contiguous. The kernel and the reference sum in different
    orders. Deterministic; a token's result does not depend on the other tokens. CUDA-graph safe, no host
    synchronisation, no workspace.
    Source: `hc_split_sinkhorn` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """
    return _hyper_collapse(streams, mix, base, scale, iterations, eps, hc_eps)


def hyper_collapse_independent(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    magnitude: float = 2.0,
    eps: float = 1e-6,
    hc_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x = sum_k pre_k X_k, and post, with which `hyper_expand` adds the sublayer's output to every stream.

    v is the concatenation of a token's n streams, and z = mix / sqrt(mean(v^2) + eps). z * scale + base consists of n
    numbers a, then n numbers b:
      pre  = sigmoid(a) + hc_eps
      post = magnitude sigmoid(b) + hc_eps

    streams  X [T, n, D] fp32, bf16 or fp16
    mix      [T, 2 n] fp32: a linear projection of v
    base     [2 n] fp32
    scale    [2] fp32: one for a and one for b
    magnitude    a finite number, `hc_magnitude` of Hy4's configuration
    eps, hc_eps  finite numbers, at least 0

    Returns x [T, D] in streams' dtype and post [T, n] fp32, contiguous. Everything is computed in fp32, and x is
    rounded once. NaN and infinities stay in their token. Differentiable: if a gradient is asked for, the formula runs
    in PyTorch. Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel with the limits of `hyper_collapse`. The kernel and the reference sum in different orders.
    Deterministic; a token's result does not depend on the other tokens. CUDA-graph safe, no host synchronisation, no
    workspace.
    Source: `HYV4HyperConnection` of transformers 5.
    """
    return _hyper_collapse_independent(streams, mix, base, scale, magnitude, eps, hc_eps)


def hyper_expand(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor | None = None
) -> torch.Tensor:
    """X'_k = post_k y + sum_j comb[j, k] X_j, in fp32, rounded once. Without comb: X'_k = post_k y + X_k.

    y        [T, D] in streams' dtype: the sublayer's output
    streams  X [T, n, D] fp32, bf16 or fp16
    post     [T, n] fp32
    comb     [T, n, n] fp32; None for independent streams

    Returns X' [T, n, D] in streams' dtype, contiguous. Differentiable: if a gradient is asked for, the formula runs in
    PyTorch. Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel. n = 4; D a multiple of 8; T D at most 2^33 - 2^13; rows of y and streams at multiples of 16
    bytes; the other tensors contiguous. Deterministic. CUDA-graph safe, no host synchronisation, no workspace.
    Source: DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """
    return _hyper_expand(y, streams, post, comb)


def hyper_head(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    eps: float = 1e-6,
    hc_eps: float = 1e-6,
) -> torch.Tensor:
    """x = sum_k (sigmoid(mix_k scale / sqrt(mean(v^2) + eps) + base_k) + hc_eps) X_k, after the last layer.

    v is the concatenation of a token's n streams. The formula is that of x in `hyper_collapse`. But mix, base and scale
    contain only the numbers for x, and belong to the model's head.

    streams  X [T, n, D] fp32, bf16 or fp16
    mix      [T, n] fp32: a linear projection of v
    base     [n] fp32
    scale    [1] fp32
    eps, hc_eps  finite numbers, at least 0

    Returns x [T, D] in streams' dtype, contiguous. Everything is computed in fp32, and x is rounded once. NaN and
    infinities stay in their token. Differentiable: if a gradient is asked for, the formula runs in PyTorch.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel with the limits of `hyper_collapse`. Deterministic; a token's result does not depend on the
    other tokens. CUDA-graph safe, no host synchronisation, no workspace.
    Source: DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """
    return _hyper_head(streams, mix, base, scale, eps, hc_eps)


def _head_results(streams: torch.Tensor) -> torch.Tensor:
    tokens, _, channels = streams.shape
    return torch.empty(tokens, channels, dtype=streams.dtype, device=streams.device)


def _collapse_results(streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, n, _ = streams.shape
    return *_independent_results(streams), torch.empty(tokens, n, n, dtype=torch.float32, device=streams.device)


def _independent_results(streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    post = torch.empty(streams.shape[:2], dtype=torch.float32, device=streams.device)
    return _head_results(streams), post


def _expand_results(streams: torch.Tensor) -> torch.Tensor:
    return torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)


@op(
    arguments=HYPER_COLLAPSE,
    reference=reference.hyper_collapse,
    results=_collapse_results,
    limits=COLLAPSE_LIMITS,
    differentiable=True,
)
def _hyper_collapse(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from dsa.kernels.elementwise.hyper_connections_sm90 import compile_hyper_collapse

    x, post, comb = _collapse_results(streams)
    if x.shape[0]:
        rows, mix, base = (rows_at_16_bytes(t) for t in (streams, mix, base))
        launch = compile_hyper_collapse(dtype_name(streams.dtype), *_tile(streams))
        launch(rows, mix, base, scale, x, post, comb.flatten(1), iterations, float(eps), float(hc_eps), None)
    return x, post, comb


@op(
    arguments=HYPER_COLLAPSE_INDEPENDENT,
    reference=reference.hyper_collapse_independent,
    results=_independent_results,
    limits=COLLAPSE_LIMITS,
    differentiable=True,
)
def _hyper_collapse_independent(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    magnitude: float,
    eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    from dsa.kernels.elementwise.hyper_connections_sm90 import compile_hyper_collapse_independent

    x, post = _independent_results(streams)
    if x.shape[0]:
        rows, mix, base = (rows_at_16_bytes(t) for t in (streams, mix, base))
        launch = compile_hyper_collapse_independent(dtype_name(streams.dtype), *_tile(streams))
        launch(rows, mix, base, scale, x, post, None, None, float(eps), float(hc_eps), float(magnitude))
    return x, post


@op(
    arguments=HYPER_EXPAND,
    reference=reference.hyper_expand,
    results=_expand_results,
    limits=LIMITS,
    differentiable=True,
)
def _hyper_expand(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor | None
) -> torch.Tensor:
    from dsa.kernels.elementwise.hyper_connections_sm90 import compile_hyper_expand

    out = _expand_results(streams)
    if y.shape[0]:
        y, rows, post = (rows_at_16_bytes(t) for t in (y, streams, post))
        weights = None if comb is None else rows_at_16_bytes(comb.flatten(1))
        compile_hyper_expand(dtype_name(streams.dtype), comb is not None)(y, rows, post, weights, out)
    return out


@op(
    arguments=HYPER_HEAD,
    reference=reference.hyper_head,
    results=_head_results,
    limits=COLLAPSE_LIMITS,
    differentiable=True,
)
def _hyper_head(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
    hc_eps: float,
) -> torch.Tensor:
    from dsa.kernels.elementwise.hyper_connections_sm90 import compile_hyper_head

    x = _head_results(streams)
    if x.shape[0]:
        rows, mix, base = (rows_at_16_bytes(t) for t in (streams, mix, base))
        launch = compile_hyper_head(dtype_name(streams.dtype), *_tile(streams))
        launch(rows, mix, base, scale, x, None, None, 1, float(eps), float(hc_eps), None)
    return x


def _tile(streams: torch.Tensor) -> tuple[int, int]:
    """Return (threads, 16-byte vectors per thread and stream) of the smallest CTA that can hold a token's streams."""
    width = 16 // streams.element_size()
    return next(tile for tile in HYPER_TILES if streams.shape[2] <= math.prod(tile) * width)
