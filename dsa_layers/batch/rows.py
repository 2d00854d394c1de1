"""Which of a pass's rows a process works on: all of them, or where several compute one model its share."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

import dsa

Kept = TypeVar("Kept", torch.Tensor, tuple[torch.Tensor, ...])


class Rows:
    """How the rows of a pass's T tokens lie on the processes that compute it. Here is one, which has them all; see
    `dsa_layers.parallel.rows` for several.

    Between layers a process has its own rows, of residual streams, norms and casts. Layers gather what they need whole,
    such as keys, and what their part of the heads, channels or experts gives for all rows is summed over the processes.
    What attention gives with all heads for a process's own rows needs no sum, nor what the shared expert gives.
    """

    parts = False  # whether several processes compute the layers, each its part of them
    shared = False  # whether a process's own rows are not all

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This process's rows of x [T, ...], which all have."""
        return x

    def own_kept(self, x: Kept) -> Kept:
        """The same of what several layers of the pass read, such as angles: computed once, and kept with x. x: a
        tensor, or a tuple of some, such as `RopeAngles`, whose rows are then one of the same class."""
        return self.own(x)

    def own_bounds(self, bounds: torch.Tensor) -> torch.Tensor:
        """int32 [B + 1]: where the sequences that begin in these of all rows begin among this process's, which are in
        the same order; kept, too."""
        return bounds

    def gather(self, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All rows [T, ...] of tensors of which each process has its own rows; these go from process to process in one
        message."""
        return own

    def begin_gather(self, *own: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        """`gather`, begun: the function that this gives ends it. What is computed in between is so meanwhile."""
        return partial(self.gather, *own)

    def begin_gather_joined(self, *own: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        """The same of tensors [T, C_i]. Those of one dtype are parts of one tensor's rows, as they are copied fastest
        where they are parts of rows before."""
        return self.begin_gather(*own)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """This process's rows of the sum of all processes' parts [T, ...]."""
        return part

    def sum_of_experts(
        self, y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`sum` of the processes' dsa.combine_experts(y, rows, weights, shared)."""
        return self.sum(dsa.combine_experts(y, rows, weights, shared))

    def begin_sum(self, part: torch.Tensor) -> Callable[..., torch.Tensor]:
        """`sum`, begun: the function that this gives ends it, and adds what it is given of this process's rows,
        (shared=None, residual=None): shared to the sum, and to both of these the residual."""

        def end(shared: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
            y = self.sum(part)
            y = y if shared is None else y + shared
            return y if residual is None else residual + y

        return end


ALL_ROWS = Rows()


def moved(x: torch.Tensor, have: Rows, want: Rows) -> torch.Tensor:
    """x of this process's rows by `have` -> x of its rows by `want`; by one of them it has all, unless they are one."""
    if have is want:
        return x
    return have.gather(x)[0] if have.shared else want.own(x)
