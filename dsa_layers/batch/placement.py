"""The distribution of a pass's rows over the ranks that compute the pass."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

import dsa

Cached = TypeVar("Cached", torch.Tensor, tuple[torch.Tensor, ...])


class Placement:
    """The placement of a pass over T tokens on one rank. This rank has all rows and computes every layer alone.
    `dsa_layers.parallel.placement` has the subclasses for several ranks.

    With several ranks, each rank has only its local rows of residual streams, norms and casts between layers. A layer
    all-gathers the tensors that it needs completely, such as keys. If a rank computes a subset of a layer's heads,
    channels or experts for all rows, its results are partial sums, and the ranks reduce them. Attention with all heads
    for the local rows needs no reduction, and the shared expert needs none either.
    """

    is_split = False  # whether several ranks compute each layer together
    sharded = False  # whether a rank has only some of the rows

    def local(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's local rows of x [T, ...]. Every rank has the complete x."""
        return x

    def local_cached(self, x: Cached) -> Cached:
        """Return `local(x)` for an x that several layers of the pass read, such as angles. The result is computed once
        and cached with x. x: a tensor, or a tuple of tensors, for which the result is a tuple of the same class."""
        return self.local(x)

    def local_bounds(self, bounds: torch.Tensor) -> torch.Tensor:
        """Return the sequence boundaries within the local rows. The local rows keep the order that they have among all
        rows. The result is cached as in `local_cached`. bounds: int32 [B + 1], the sequence boundaries within all
        rows."""
        return bounds

    def all_gather(self, *local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return all rows [T, ...] of tensors of which each rank has its local rows. One message sends all tensors."""
        return local

    def start_all_gather(self, *local: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Start `all_gather` and return a function that finishes it. Kernels that are launched before this function is
        called overlap with the communication."""
        return partial(self.all_gather, *local)

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Return the local rows of the sum of all ranks' tensors `part` [T, ...]."""
        return part

    def reduce_experts(
        self, y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `reduce` of dsa.combine_experts(y, rows, weights, shared), which each rank computes."""
        return self.reduce(dsa.combine_experts(y, rows, weights, shared))

    def start_reduce(self, part: torch.Tensor) -> Callable[..., torch.Tensor]:
        """Start `reduce`. Return a function (shared=None, residual=None) that finishes the reduction and returns
        residual + (sum + shared). shared and residual have the local rows."""

        def finish(shared: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
            y = self.reduce(part)
            y = y if shared is None else y + shared
            return y if residual is None else residual + y

        return finish


WHOLE = Placement()


def redistribute(x: torch.Tensor, have: Placement, want: Placement) -> torch.Tensor:
    """Convert x from the local rows of placement `have` to the local rows of placement `want`. The placements are the
    same object, or at least one of them has all rows."""
    if have is want:
        return x
    return have.all_gather(x)[0] if have.sharded else want.local(x)
