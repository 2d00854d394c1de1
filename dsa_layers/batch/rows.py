"""Which of a pass's rows a process works on: all of them, or where several compute one model its share."""

import torch


class Rows:
    """How the rows of a pass's T tokens lie on the processes that compute it. Here is one, which has them all; see
    `dsa_layers.parallel.rows` for several.

    Between layers a process has its own rows, of residual streams, norms and casts. Layers gather what they need whole,
    such as keys, and what their part of the heads, channels or experts gives for all rows is summed over the processes.
    """

    parts = False  # whether layers give parts of sums
    shared = False  # whether a process's own rows are not all

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This process's rows of x [T, ...], which all have."""
        return x

    def gather(self, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """All rows [T, ...] of tensors of which each process has its own rows."""
        return own

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """This process's rows of the sum of all processes' parts [T, ...]."""
        return part


ALL_ROWS = Rows()
