"""Hyper-connections, which replace the residual stream by several streams. DeepSeek-V4's mix the streams by
approximately doubly stochastic matrices; Hy4's streams are independent."""

from typing import Any

import torch
from torch import nn

import dsa


class StreamMixing(nn.Module):
    """The parameters that all classes here have, in fp32: fn [count, n D], base [count] and scale [scales], for n
    residual streams of D = hidden channels."""

    def __init__(self, hidden: int, streams: int, count: int, scales: int) -> None:
        super().__init__()
        self.fn = nn.Parameter(torch.zeros(count, streams * hidden, dtype=torch.float32))
        self.base = nn.Parameter(torch.zeros(count, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(scales, dtype=torch.float32))

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """Compute fn v, fp32 [T, count]. v: the streams x [T, n, D], flattened to [T, n D]."""
        return nn.functional.linear(x.flatten(1).float(), self.fn.float())


class HyperConnection(StreamMixing):
    """DeepSeek-V4's hyper-connection of one sublayer, for n residual streams X.

    collapse(X [T, n, D]) -> (x [T, D], post fp32 [T, n], comb fp32 [T, n, n]): `dsa.hyper_collapse` of X and
    mix = fn v, with the flattened streams v. x is the sublayer's input.
    expand(y [T, D], X, post, comb) -> X' [T, n, D], the new streams: `dsa.hyper_expand`. y is the sublayer's output.
    Parameters, fp32: fn [(2 + n) n, n D], base [(2 + n) n], scale [3].
    Source: `hc_split_sinkhorn` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """

    def __init__(self, hidden: int, streams: int, *, iterations: int = 20, eps: float = 1e-6, hc_eps: float = 1e-6):
        super().__init__(hidden, streams, (2 + streams) * streams, 3)
        self.iterations, self.eps, self.hc_eps = iterations, eps, hc_eps

    def collapse(
        self, x: torch.Tensor, mix: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (x, post, comb). mix: fn v, if the caller has already computed it."""
        mix = self.project(x) if mix is None else mix
        return dsa.hyper_collapse(x, mix, self.base.float(), self.scale.float(), **self.options())

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `dsa.hyper_collapse`."""
        return {"iterations": self.iterations, "eps": self.eps, "hc_eps": self.hc_eps}

    def expand(self, y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        return dsa.hyper_expand(y, x, post, comb)


class IndependentHyperConnection(StreamMixing):
    """Hy4's hyper-connection of one sublayer. It does not mix the residual streams: X'_k = X_k + post_k y.

    collapse(X [T, n, D]) -> (x [T, D], post fp32 [T, n]): `dsa.hyper_collapse_independent` of X and mix = fn v, with
    the flattened streams v. x is the sublayer's input.
    expand(y [T, D], X, post) -> X' [T, n, D], the new streams: `dsa.hyper_expand`. y is the sublayer's output.
    Parameters, fp32: fn [2 n, n D], base [2 n], scale [2].
    Source: `HYV4HyperConnection` of transformers 5.
    """

    def __init__(
        self, hidden: int, streams: int, *, magnitude: float = 2.0, eps: float = 1e-6, hc_eps: float = 1e-6
    ) -> None:
        super().__init__(hidden, streams, 2 * streams, 2)
        self.magnitude, self.eps, self.hc_eps = magnitude, eps, hc_eps

    def collapse(self, x: torch.Tensor, mix: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (x, post). mix: fn v, if the caller has already computed it."""
        mix = self.project(x) if mix is None else mix
        return dsa.hyper_collapse_independent(x, mix, self.base.float(), self.scale.float(), **self.options())

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `dsa.hyper_collapse_independent`."""
        return {"magnitude": self.magnitude, "eps": self.eps, "hc_eps": self.hc_eps}

    def expand(self, y: torch.Tensor, x: torch.Tensor, post: torch.Tensor) -> torch.Tensor:
        return dsa.hyper_expand(y, x, post)


class HyperHead(StreamMixing):
    """x = sum_k (sigmoid(scale fn v / sqrt(mean(v^2) + eps) + base)_k + hc_eps) X_k: the model's final sum of streams.

    v are the flattened streams. X [T, n, D] -> [T, D], computed by `dsa.hyper_head`.
    Parameters, fp32: fn [n, n D], base [n], scale [1].
    """

    def __init__(self, hidden: int, streams: int, *, eps: float = 1e-6, hc_eps: float = 1e-6) -> None:
        super().__init__(hidden, streams, streams, 1)
        self.eps, self.hc_eps = eps, hc_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mix, base, scale = self.project(x), self.base.float(), self.scale.float()
        return dsa.hyper_head(x, mix, base, scale, eps=self.eps, hc_eps=self.hc_eps)
