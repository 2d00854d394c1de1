"""DeepSeek-V4's manifold-constrained hyper-connections: what a sublayer gets of n residual streams, and gives back."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.checks import (
    FLOATS,
    check_memory,
    check_number,
    check_positive,
    check_same_device,
    check_same_dtype,
    check_tensor,
)

MOST_ITERATIONS = 1000  # of Sinkhorn, which has long converged


@without_autocast
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

    Returns x [T, D] in streams' dtype, post [T, n] and comb [T, n, n] fp32. All is fp32 and x rounds once. Gradients
    flow to every tensor. Raises TypeError or ValueError for other types, dtypes and shapes.
    Source: `hc_split_sinkhorn` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """
    check_collapse(streams, mix, base, scale, iterations, eps, hc_eps)
    check_memory("streams", streams)
    n = streams.shape[1]
    v = streams.flatten(1).float()
    z = mix * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    pre, post, comb = z.split((n, n, n * n), -1)
    pre_base, post_base, comb_base = base.split((n, n, n * n))
    pre = torch.sigmoid(pre * scale[0] + pre_base) + hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = torch.softmax((comb * scale[2] + comb_base).unflatten(-1, (n, n)), -1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return torch.einsum("tk,tkd->td", pre, streams.float()).to(streams.dtype), post, comb


@without_autocast
def hyper_expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """X'_k = post_k y + sum_j comb[j, k] X_j, in fp32, rounded once.

    y        [T, D] of streams' dtype: the sublayer's output
    streams  X [T, n, D] fp32, bf16 or fp16
    post     [T, n] fp32
    comb     [T, n, n] fp32

    Returns X' [T, n, D] in streams' dtype. Gradients flow to every tensor. Raises TypeError or ValueError for other
    types, dtypes and shapes.
    """
    check_expand(y, streams, post, comb)
    check_memory("streams", streams)
    mixed = torch.einsum("tjk,tjd->tkd", comb, streams.float())
    return (post[..., None] * y.float()[:, None] + mixed).to(streams.dtype)


def check_collapse(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    hc_eps: float,
) -> None:
    """The checks of `hyper_collapse`."""
    n = _check_streams(streams)
    check_tensor("mix", mix, (torch.float32,), (streams.shape[0], (2 + n) * n), "streams")
    check_tensor("base", base, (torch.float32,), ((2 + n) * n,), "streams")
    check_tensor("scale", scale, (torch.float32,), (3,))
    check_positive("iterations", iterations, MOST_ITERATIONS)
    check_number("eps", eps, 0)
    check_number("hc_eps", hc_eps, 0)
    check_same_device(("streams", streams), mix=mix, base=base, scale=scale)


def check_expand(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> None:
    """The checks of `hyper_expand`."""
    n = _check_streams(streams)
    tokens, _, channels = streams.shape
    check_tensor("y", y, FLOATS, (tokens, channels), "streams")
    check_same_dtype(("streams", streams), y=y)
    check_tensor("post", post, (torch.float32,), (tokens, n), "streams")
    check_tensor("comb", comb, (torch.float32,), (tokens, n, n), "streams")
    check_same_device(("streams", streams), y=y, post=post, comb=comb)


def _check_streams(streams: torch.Tensor) -> int:
    check_tensor("streams", streams, FLOATS, ("T", "n", "D"))
    if streams.shape[1] == 0 or streams.shape[2] == 0:
        raise ValueError(f"streams: must have at least one stream and one channel, got shape {list(streams.shape)}")
    return streams.shape[1]
