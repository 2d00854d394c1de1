"""Manifold-constrained hyper-connections: several residual streams, mixed by doubly stochastic matrices."""

import torch
from torch import nn


class HyperConnection(nn.Module):
    """What goes into a sublayer of n residual streams, and how its output and the streams make the new ones.

    mix = fn v / sqrt(mean(v^2) + eps), v the streams flattened, all in fp32; its n + n + n^2 numbers times scale plus
    base give
      pre  = sigmoid(.) + hc_eps               x = sum_k pre_k X_k goes into the sublayer
      post = 2 sigmoid(.)
      comb = Sinkhorn(softmax(.) + hc_eps)     X'_k = post_k y + sum_j comb[j, k] X_j, y the sublayer's output
    where Sinkhorn divides columns by their sums + hc_eps, then `iterations` - 1 times rows and columns.

    collapse(X [T, n, D]) -> (x [T, D], post fp32 [T, n], comb fp32 [T, n, n]); expand(y [T, D], X, post, comb) -> X'.
    Parameters, fp32: fn [(2 + n) n, n D], base [(2 + n) n], scale [3].
    Source: `hc_split_sinkhorn` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """

    def __init__(self, hidden: int, streams: int, *, iterations: int = 20, eps: float = 1e-6, hc_eps: float = 1e-6):
        super().__init__()
        self.streams, self.iterations, self.eps, self.hc_eps = streams, iterations, eps, hc_eps
        count = (2 + streams) * streams
        self.fn = nn.Parameter(torch.zeros(count, streams * hidden, dtype=torch.float32))
        self.base = nn.Parameter(torch.zeros(count, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float32))

    def collapse(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        n = self.streams
        pre, post, comb = _mix(x, self.fn, self.eps).split((n, n, n * n), -1)
        pre_base, post_base, comb_base = self.base.split((n, n, n * n))
        pre = torch.sigmoid(pre * self.scale[0] + pre_base) + self.hc_eps
        post = 2 * torch.sigmoid(post * self.scale[1] + post_base)
        comb = torch.softmax((comb * self.scale[2] + comb_base).unflatten(-1, (n, n)), -1) + self.hc_eps
        comb = comb / (comb.sum(-2, keepdim=True) + self.hc_eps)
        for _ in range(self.iterations - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + self.hc_eps)
            comb = comb / (comb.sum(-2, keepdim=True) + self.hc_eps)
        return torch.einsum("tk,tkd->td", pre, x.float()).to(x.dtype), post, comb

    def expand(self, y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        mixed = torch.einsum("tjk,tjd->tkd", comb, x.float())
        return (post[..., None] * y.float()[:, None] + mixed).to(x.dtype)


class HyperHead(nn.Module):
    """x = sum_k (sigmoid(scale fn v / sqrt(mean(v^2) + eps) + base)_k + hc_eps) X_k: the streams to one, at the end.

    X [T, n, D] -> [T, D]. Parameters, fp32: fn [n, n D], base [n], scale [1].
    """

    def __init__(self, hidden: int, streams: int, *, eps: float = 1e-6, hc_eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.hc_eps = eps, hc_eps
        self.fn = nn.Parameter(torch.zeros(streams, streams * hidden, dtype=torch.float32))
        self.base = nn.Parameter(torch.zeros(streams, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pre = torch.sigmoid(_mix(x, self.fn, self.eps) * self.scale + self.base) + self.hc_eps
        return torch.einsum("tk,tkd->td", pre, x.float()).to(x.dtype)


def _mix(x: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """fn v / sqrt(mean(v^2) + eps) of the streams X [T, n, D], flattened, in fp32."""
    v = x.flatten(1).float()
    return nn.functional.linear(v, fn.float()) * torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
