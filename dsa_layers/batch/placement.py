"""The distribution of a pass's rows over the ranks that compute the pass."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch


class Placement:
    """The rows that a rank stores in a pass over T tokens. This class is for one rank; the subclasses in
    `dsa_layers.parallel.placement` are for several ranks.

    Tensors between layers, such as residual streams, have one row per token. The local rows of a rank are the rows of
    these tensors that the rank stores: all T rows, or only some if `sharded`. A layer that needs all rows of a tensor,
    for example of keys, all-gathers the tensor. If each rank computes a subset of a layer's heads, channels or experts
    for all rows, the results are partial sums, and the ranks reduce them.
    """

    is_split = False  # whether several ranks compute each layer together
    sharded = False  # whether a rank has only some of the rows

    def local(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's local rows of x [T, ...]. x has all rows on every rank."""
        return x

    def local_cached(self, x: Any) -> Any:
        """Return `local(x)`. If x is a tuple of tensors, return the tuple of their local rows. A sharded placement
        caches the result, because several layers of the pass read the same x, for example angles."""
        return self.local(x)

    def local_bounds(self, bounds: torch.Tensor) -> torch.Tensor:
        """Return int32 [B + 1]: the number of local rows before each sequence boundary. bounds int32 [B + 1]: the
        boundaries among all rows. A sharded placement caches the result."""
        return bounds

    def all_gather(self, *local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return all rows [T, ...] of each tensor in `local`. These tensors have this rank's local rows. Each rank
        sends its rows of all tensors in one message."""
        return local

    def start_all_gather(self, *local: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Start `all_gather` and return a function that finishes it. Kernels that are launched in between can overlap
        with the communication."""
        return partial(self.all_gather, *local)

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Return the local rows of the sum of all ranks' tensors `part` [T, ...]."""
        return part

    def start_reduce(self, part: torch.Tensor) -> Callable[..., torch.Tensor]:
        """Start `reduce`. Return a function (shared=None, residual=None) that finishes it and returns residual + (sum +
        shared), with the local rows of the sum. shared and residual have the local rows; None adds nothing."""

        def finish(shared: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
            y = self.reduce(part)
            y = y if shared is None else y + shared
            return y if residual is None else residual + y

        return finish


WHOLE = Placement()


def redistribute(x: torch.Tensor, have: Placement, want: Placement) -> torch.Tensor:
    """Convert x from the local rows of placement `have` to the local rows of placement `want`. The placements must be
    the same object, or one of them must have all rows on every rank."""
    if have is want:
        return x
    return have.all_gather(x)[0] if have.sharded else want.local(x)
