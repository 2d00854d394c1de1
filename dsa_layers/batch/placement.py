"""The placement of a pass's rows on the ranks that compute it."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

import dsa

Cached = TypeVar("Cached", torch.Tensor, tuple[torch.Tensor, ...])


class Placement:
    """The placement of a pass over T tokens on one rank, which has all rows and computes every layer by itself.
    `dsa_layers.parallel.placement` has the placements on several ranks.

    Between layers a rank has its local rows of residual streams, norms and casts. A layer gathers tensors that it needs
    whole, such as keys. If a rank computes some heads, channels or experts of a layer for all rows, the results are
    partial sums, which are reduced over the ranks. Attention with all heads for the local rows needs no reduction, and
    neither does the shared expert.
    """

    is_split = False  # whether several ranks compute the layers
    sharded = False  # whether a rank has some of the rows only

    def local(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of x [T, ...], which every rank has whole."""
        return x

    def local_cached(self, x: Cached) -> Cached:
        """`local` of a tensor that several layers of the pass read, such as angles. It is computed once and kept with
        x. x: a tensor, or a tuple of tensors, which gives a tuple of the same class."""
        return self.local(x)

    def local_bounds(self, bounds: torch.Tensor) -> torch.Tensor:
        """bounds int32 [B + 1], the rows at which the sequences begin -> their beginnings among the local rows, which
        are in the same order. Kept like `local_cached`."""
        return bounds

    def all_gather(self, *local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All rows [T, ...] of tensors of which each rank has its local rows. All tensors are one message."""
        return local

    def start_all_gather(self, *local: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Start `all_gather`. Return the function that finishes it; kernels launched in between overlap with it."""
        return partial(self.all_gather, *local)

    def start_joint_all_gather(self, *local: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        """`start_all_gather` of tensors [T, C_i]. Tensors of one dtype are joined column-wise before they are sent:
        that is fastest if they are columns of one tensor already."""
        return self.start_all_gather(*local)

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The local rows of the sum of all ranks' parts [T, ...]."""
        return part

    def reduce_experts(
        self, y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`reduce` of the ranks' dsa.combine_experts(y, rows, weights, shared)."""
        return self.reduce(dsa.combine_experts(y, rows, weights, shared))

    def start_reduce(self, part: torch.Tensor) -> Callable[..., torch.Tensor]:
        """Start `reduce`. Return a function (shared=None, residual=None) that finishes it and returns residual + (sum +
        shared), for local rows of both."""

        def finish(shared: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
            y = self.reduce(part)
            y = y if shared is None else y + shared
            return y if residual is None else residual + y

        return finish


WHOLE = Placement()


def redistribute(x: torch.Tensor, have: Placement, want: Placement) -> torch.Tensor:
    """x with the local rows of `have` -> x with the local rows of `want`. They are the same, or one of them has all
    rows."""
    if have is want:
        return x
    return have.all_gather(x)[0] if have.sharded else want.local(x)
