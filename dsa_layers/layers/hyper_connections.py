"""Manifold-constrained hyper-connections: several residual streams, mixed by doubly stochastic matrices."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn

import dsa
from dsa_layers.layers.bf16_parts import BF16Parts


class _Mixing(nn.Module):
    """A projection of the flattened streams X [T, n, D] in fp32. Parameters, fp32: fn [count, n D], base [count],
    scale [scales].

    On a GPU, where no gradient is asked for, of bf16 streams it is `dsa.hyper_mix`.
    """

    def __init__(self, hidden: int, streams: int, count: int, scales: int) -> None:
        super().__init__()
        self.fn = nn.Parameter(torch.zeros(count, streams * hidden, dtype=torch.float32))
        self.base = nn.Parameter(torch.zeros(count, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(scales, dtype=torch.float32))
        self._fn_parts = BF16Parts()

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """fn v -> fp32 [T, count]; v the streams, flattened."""
        parts = self.parts_for(x)
        if parts is not None:
            return dsa.hyper_mix(x, parts)
        return nn.functional.linear(x.flatten(1).float(), self.fn.float())

    def parts_for(self, x: torch.Tensor) -> torch.Tensor | None:
        """The parts of fn if the projection of streams like x is `dsa.hyper_mix`, else None."""
        exact = x.dtype == torch.bfloat16 and self.fn.dtype == torch.float32  # products of the parts, in fp32
        if exact and x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return self._fn_parts.of(self.fn)
        return None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        moved = super()._apply(fn, recurse)
        self._fn_parts.update(self.fn)
        return moved

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._fn_parts.update(self.fn)  # for the graphs that read them


class HyperConnection(_Mixing):
    """What goes into a sublayer of n residual streams, and how its output and the streams make the new ones.

    collapse(X [T, n, D]) -> (x [T, D], post fp32 [T, n], comb fp32 [T, n, n]) is `dsa.hyper_collapse` of mix = fn v, v
    the streams flattened; expand(y [T, D], X, post, comb) -> X' is `dsa.hyper_expand`, y the sublayer's output. In
    decoder blocks both are done together with what stands beside them (`hyper_sublayer`).
    Parameters, fp32: fn [(2 + n) n, n D], base [(2 + n) n], scale [3].
    Source: `hc_split_sinkhorn` of DeepSeek-V4's inference code; arXiv 2606.19348, section 2.2.
    """

    def __init__(self, hidden: int, streams: int, *, iterations: int = 20, eps: float = 1e-6, hc_eps: float = 1e-6):
        super().__init__(hidden, streams, (2 + streams) * streams, 3)
        self.iterations, self.eps, self.hc_eps = iterations, eps, hc_eps

    def collapse(
        self, x: torch.Tensor, mix: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """mix: fn v, if the caller has it."""
        mix = self.project(x) if mix is None else mix
        return dsa.hyper_collapse(x, mix, self.base.float(), self.scale.float(), **self.options())

    def options(self) -> dict[str, Any]:
        """Of the ops that collapse."""
        return {"iterations": self.iterations, "eps": self.eps, "hc_eps": self.hc_eps}

    def expand(self, y: torch.Tensor, x: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
        return dsa.hyper_expand(y, x, post, comb)


class HyperHead(_Mixing):
    """x = sum_k (sigmoid(scale fn v / sqrt(mean(v^2) + eps) + base)_k + hc_eps) X_k: the streams to one, at the end.

    X [T, n, D] -> [T, D], by `dsa.hyper_head`. Parameters, fp32: fn [n, n D], base [n], scale [1].
    """

    def __init__(self, hidden: int, streams: int, *, eps: float = 1e-6, hc_eps: float = 1e-6) -> None:
        super().__init__(hidden, streams, streams, 1)
        self.eps, self.hc_eps = eps, hc_eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mix, base, scale = self.project(x), self.base.float(), self.scale.float()
        return dsa.hyper_head(x, mix, base, scale, eps=self.eps, hc_eps=self.hc_eps)
