"""DeepSeek-V4's hyper-connections: residual streams to a sublayer's input, and its output back to the streams."""

import functools
from collections.abc import Callable

import torch

from dsa import backends
from dsa.ops._aligned import rows_at_16_bytes
from dsa.ops._kernel_arguments import check_rows, dtype_name
from dsa.reference.elementwise import hyper_connections as reference

STREAMS, CHANNEL_MULTIPLE = 4, 8
# Collapse: threads of a CTA, and vectors of 16 bytes that each has of a stream.
TILES = ((128, 2), (256, 2), (512, 2), (512, 4))
MOST_CHANNELS = 2**33 - 2**13  # of all tokens: a kernel counts their vectors, at least 4 channels each, in 31 bits


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
    """x = sum_k pre_k X_k, and the weights by which `hyper_expand` makes the new streams.

    z = mix / sqrt(mean(v^2) + eps), v a token's streams flattened; its n + n + n^2 numbers times scale plus base give
      pre  = sigmoid(.) + hc_eps
      post = 2 sigmoid(.)
      comb = Sinkhorn(softmax(.) + hc_eps)
    where Sinkhorn divides columns by their sums + hc_eps, then `iterations` - 1 times rows and columns.

    streams  X [T, n, D] fp32, bf16 or fp16
    mix      [T, (2 + n) n] fp32: fn v, a projection of the streams
    base     [(2 + n) n] fp32
    scale    [3] fp32: of pre, post and comb
    iterations   from 1 to 1000
    eps, hc_eps  finite numbers, at least 0

    Returns x [T, D] in streams' dtype, post [T, n] and comb [T, n, n] fp32, contiguous. All is fp32 and x rounds once.
    NaN and infinities stay in their token. Differentiable: where a gradient is asked for, the PyTorch formula runs.
    Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel, n = 4, D a multiple of 8 and at most 16384 (fp32: 8192), T D at most 2^33 - 2^13, streams
    with rows at multiples of 16 bytes, the others contiguous. Another order of sums than the reference's.
    Deterministic, and the same for a token whatever the others. CUDA-graph safe, no host synchronisation, no workspace.
    Source: `hc_split_sinkhorn` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """
    arguments = (streams, mix, base, scale, iterations, eps, hc_eps)
    if torch.compiler.is_compiling() and not _wants_gradient(streams, mix, base, scale):
        return torch.ops.dsa.hyper_collapse(*arguments)
    return _collapse(*arguments)


def hyper_expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X'_k = post_k y + sum_j comb[j, k] X_j, in fp32, rounded once.

    y        [T, D] of streams' dtype: the sublayer's output
    streams  X [T, n, D] fp32, bf16 or fp16
    post     [T, n] fp32
    comb     [T, n, n] fp32

    Returns X' [T, n, D] in streams' dtype, contiguous. Differentiable: where a gradient is asked for, the PyTorch
    formula runs. Raises TypeError or ValueError for other types, dtypes, shapes, strides and devices.
    On Hopper: one kernel, n = 4, D a multiple of 8, T D at most 2^33 - 2^13, y and streams with rows at multiples of 16
    bytes, the others contiguous. Deterministic. CUDA-graph safe, no host synchronisation, no workspace.
    Source: DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """
    if torch.compiler.is_compiling() and not _wants_gradient(y, streams, post, comb):
        return torch.ops.dsa.hyper_expand(y, streams, post, comb)
    return _expand(y, streams, post, comb)


def _wants_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)


def _collapse(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    reference.check_collapse(streams, mix, base, scale, iterations, eps, hc_eps)
    if not backends.runs_kernel("hyper_collapse", streams) or _wants_gradient(streams, mix, base, scale):
        return reference.hyper_collapse(streams, mix, base, scale, iterations=iterations, eps=eps, hc_eps=hc_eps)
    small = {"mix": mix, "base": base, "scale": scale}
    _check_kernel_takes(streams)
    tile = _tile(streams)
    rows = _rows("streams", streams)
    for name, value in small.items():
        _check_contiguous(name, value)
    mix, base = _rows("mix", mix), _rows("base", base)
    x, post, comb = _allocate(streams)
    if x.shape[0]:
        with backends.on_device(streams):
            _collapse_kernel(streams.dtype, *tile)(
                rows, mix, base, scale, x, post, comb.flatten(1), iterations, float(eps), float(hc_eps)
            )
    return x, post, comb


def _expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    reference.check_expand(y, streams, post, comb)
    if not backends.runs_kernel("hyper_expand", streams) or _wants_gradient(y, streams, post, comb):
        return reference.hyper_expand(y, streams, post, comb)
    _check_kernel_takes(streams)
    y, rows = _rows("y", y), _rows("streams", streams)
    for name, value in (("post", post), ("comb", comb)):
        _check_contiguous(name, value)
    post, weights = _rows("post", post), _rows("comb", comb.flatten(1))
    out = torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
    if y.shape[0]:
        with backends.on_device(streams):
            _expand_kernel(streams.dtype)(y, rows, post, weights, out)
    return out


def _check_kernel_takes(streams: torch.Tensor) -> None:
    tokens, n, channels = streams.shape
    if n != STREAMS:
        raise ValueError(f"streams: the Hopper kernel takes n {STREAMS} streams, got {n}")
    if channels % CHANNEL_MULTIPLE:
        raise ValueError(f"streams: the Hopper kernel takes D a multiple of {CHANNEL_MULTIPLE}, got {channels}")
    if tokens * channels > MOST_CHANNELS:
        raise ValueError(
            f"streams: the Hopper kernel takes T D at most {MOST_CHANNELS} channels, got shape {list(streams.shape)}"
        )


def _tile(streams: torch.Tensor) -> tuple[int, int]:
    """The smallest CTA that has a token in its registers."""
    width = 16 // streams.element_size()
    for threads, steps in TILES:
        if streams.shape[2] <= threads * steps * width:
            return threads, steps
    raise ValueError(
        f"streams: the Hopper kernel takes D at most {TILES[-1][0] * TILES[-1][1] * width} of "
        f"{dtype_name(streams.dtype)}, got {streams.shape[2]}"
    )


def _rows(name: str, x: torch.Tensor) -> torch.Tensor:
    check_rows(name, x)
    return rows_at_16_bytes(x)


def _check_contiguous(name: str, x: torch.Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, got strides {list(x.stride())}")


@functools.cache
def _collapse_kernel(dtype: torch.dtype, threads: int, steps: int) -> Callable[..., None]:
    from dsa.kernels.elementwise.hyper_connections_sm90 import compile_hyper_collapse

    return compile_hyper_collapse(dtype_name(dtype), threads, steps)


@functools.cache
def _expand_kernel(dtype: torch.dtype) -> Callable[..., None]:
    from dsa.kernels.elementwise.hyper_connections_sm90 import compile_hyper_expand

    return compile_hyper_expand(dtype_name(dtype))


def _allocate(streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, n, channels = streams.shape
    x = torch.empty(tokens, channels, dtype=streams.dtype, device=streams.device)
    post, comb = (torch.empty(tokens, *s, dtype=torch.float32, device=streams.device) for s in ((n,), (n, n)))
    return x, post, comb


torch.library.custom_op("dsa::hyper_collapse", mutates_args=())(_collapse)
torch.library.custom_op("dsa::hyper_expand", mutates_args=())(_expand)


@torch.library.register_fake("dsa::hyper_collapse")
def _(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    hc_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    reference.check_collapse(streams, mix, base, scale, iterations, eps, hc_eps)
    return _allocate(streams)


@torch.library.register_fake("dsa::hyper_expand")
def _(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    reference.check_expand(y, streams, post, comb)
    return torch.empty(streams.shape, dtype=streams.dtype, device=streams.device)
