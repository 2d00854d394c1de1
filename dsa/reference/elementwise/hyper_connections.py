"""Hyper-connections between n residual streams and a sublayer: DeepSeek-V4's manifold-constrained ones, and Hy4's with
independent streams."""

import torch

from dsa.reference.autocast import without_autocast


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
    """x = sum_k pre_k X_k, and the weights with which `hyper_expand` makes the new streams.

    v is the concatenation of a token's n streams X_k, and z = mix / sqrt(mean(v^2) + eps). z * scale + base consists of
    n numbers a, n numbers b and a matrix c [n, n]; `scale` has one number for a, one for b and one for c.
      pre  = sigmoid(a) + hc_eps
      post = 2 sigmoid(b)
      comb = Sinkhorn(softmax(c) + hc_eps), with the softmax over each row
    Sinkhorn divides every column by its sum + hc_eps. Then, `iterations` - 1 times, it divides every row and after that
    every column in the same way.

    Returns (x, post, comb). Everything is computed in fp32, and x is rounded once. Gradients flow to every tensor.
    Arguments as in `dsa.hyper_collapse`.
    Source: `hc_split_sinkhorn` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """
    n = streams.shape[1]
    v = streams.flatten(1).float().contiguous()
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
    x = torch.einsum("tk,tkd->td", pre, streams.float()).to(streams.dtype)
    return x.contiguous(), post.contiguous(), comb.contiguous()


@without_autocast
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

    v is the concatenation of a token's n streams X_k, and z = mix / sqrt(mean(v^2) + eps). z * scale + base consists of
    n numbers a and n numbers b; `scale` has one number for a and one for b.
      pre  = sigmoid(a) + hc_eps
      post = magnitude sigmoid(b) + hc_eps

    Returns (x, post). Everything is computed in fp32, and x is rounded once. Gradients flow to every tensor. Arguments
    as in `dsa.hyper_collapse_independent`.
    Source: `HYV4HyperConnection` of transformers 5.
    """
    v = streams.flatten(1).float().contiguous()
    z = mix * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    pre, post = torch.sigmoid(z * scale.repeat_interleave(streams.shape[1]) + base).chunk(2, -1)
    x = torch.einsum("tk,tkd->td", pre + hc_eps, streams.float()).to(streams.dtype)
    return x.contiguous(), (magnitude * post + hc_eps).contiguous()


@without_autocast
def hyper_expand(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor | None = None
) -> torch.Tensor:
    """X'_k = post_k y + sum_j comb[j, k] X_j, or post_k y + X_k without comb: new streams, computed in fp32 and rounded
    once.

    Gradients flow to every tensor. Arguments as in `dsa.hyper_expand`.
    """
    mixed = streams.float() if comb is None else torch.einsum("tjk,tjd->tkd", comb, streams.float())
    return (post[..., None] * y.float()[:, None] + mixed).to(streams.dtype).contiguous()


@without_autocast
def hyper_head(
    streams: torch.Tensor,
    mix: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    *,
    eps: float = 1e-6,
    hc_eps: float = 1e-6,
) -> torch.Tensor:
    """x = sum_k (sigmoid(mix_k scale / sqrt(mean(v^2) + eps) + base_k) + hc_eps) X_k, v the concatenation of the X_k.

    Everything is computed in fp32, and x is rounded once. Gradients flow to every tensor. Arguments as in
    `dsa.hyper_head`.
    """
    v = streams.float()
    inverse = torch.rsqrt(v.flatten(1).square().mean(-1, keepdim=True) + eps)
    pre = torch.sigmoid(mix * inverse * scale + base) + hc_eps
    return torch.einsum("tk,tkd->td", pre, v).to(streams.dtype)
