"""The rows of a pass on several ranks: all of them on each, or where they are many a share on each."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from dsa_layers.batch import packing
from dsa_layers.batch.rows import ALL_ROWS, Kept, Rows
from dsa_layers.batch.tokens import Tokens
from dsa_layers.parallel.ranks import Ranks, all_gather

# New tokens of a pass from which on each rank has its own share of the rows between layers.
SHARED_ROWS = 256


def rows_of(batch: Tokens, ranks: Ranks) -> Rows:
    """How the rows of a pass lie on the ranks."""
    if ranks.size == 1:
        return ALL_ROWS
    count = sum(batch.query_lens)
    shared = ranks.shares_rows and not batch.is_decode and count >= SHARED_ROWS
    return SharedRows(ranks, count) if shared else WholeRows(ranks)


class WholeRows(Rows):
    """Every rank has all rows: what layers compute between products is little then, and what is said costs its latency
    alone, one time a sum."""

    parts = True

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return self._ranks.sum(part)


class SharedRows(Rows):
    """Each rank has two pieces of the rows, of 2 N about equal ones the one of its number and the one as far from the
    end: later tokens see more keys, and so all ranks have as many pairs of a query and a key. Sums are those of
    `Ranks.sum`, bit for bit. What is begun is torch.distributed's to do beside the rank's own work: on a GPU NCCL has a
    stream of its own, which the end makes the rank's stream wait for."""

    parts = shared = True

    def __init__(self, ranks: Ranks, count: int) -> None:
        self._ranks, self.count, pieces = ranks, count, 2 * ranks.size
        ends = [count * i // pieces for i in range(pieces + 1)]
        cuts = [slice(*piece) for piece in pairwise(ends)]
        self._pieces = [(cuts[rank], cuts[-1 - rank]) for rank in range(ranks.size)]
        self._counts = [sum(piece.stop - piece.start for piece in own) for own in self._pieces]
        self._most = max(self._counts)
        # Rows by the ranks that have them, and where each row is among the ranks' own, which are padded alike.
        every = torch.arange(count)
        self._by_rank = torch.cat([every[piece] for own in self._pieces for piece in own])
        padded = torch.cat([torch.arange(n) + rank * self._most for rank, n in enumerate(self._counts)])
        self._places = torch.empty_like(every)
        self._places[self._by_rank] = padded
        self._kept: dict[tuple[str, int], tuple[Any, Any]] = {}

    def own(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[piece] for piece in self._pieces[self._ranks.rank]])

    def own_kept(self, x: Kept) -> Kept:
        return self._keep("own", x, self._own_of)

    def own_bounds(self, bounds: torch.Tensor) -> torch.Tensor:
        return self._keep("bounds", bounds, self._rows_before)

    def pieces(self, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The two pieces of this rank's rows."""
        return own.split([piece.stop - piece.start for piece in self._pieces[self._ranks.rank]])

    def gather(self, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(self._gather, own))

    def gather_joined(self, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if len(own) < 2 or len({x.dtype for x in own}) > 1:
            return self.gather(*own)
        (whole,) = self.gather(torch.cat(own, -1))
        return whole.split([x.shape[-1] for x in own], -1)

    def begin_gather(self, *own: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        begun = [self._begin_gather(x, at_once=False) for x in own]
        return lambda: tuple(end() for end in begun)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return self._begin_sum(part, at_once=True)()

    def begin_sum(self, part: torch.Tensor) -> Callable[..., torch.Tensor]:
        return self._begin_sum(part, at_once=False)

    def _begin_sum(self, part: torch.Tensor, *, at_once: bool) -> Callable[..., torch.Tensor]:
        sent = part[self._index("_by_rank", part.device)]
        own, size = self._counts[self._ranks.rank], self._ranks.size
        parts = part.new_empty(size * own, *part.shape[1:])
        counts, options = ([own] * size, self._counts), {"group": self._ranks.group, "async_op": not at_once}
        work = dist.all_to_all_single(parts, sent, *counts, **options)

        def end(shared: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
            if work is not None:
                work.wait()
            return self._ranks.sum_parts(parts.unflatten(0, (size, own)), shared, residual)

        return end

    def _own_of(self, x: Kept) -> Kept:
        return type(x)(map(self.own_kept, x)) if isinstance(x, tuple) else self.own(x)

    def _keep(self, what: str, x: Kept, make: Callable[[Kept], Kept]) -> Kept:
        """what: `make` makes of x."""
        if (what, id(x)) not in self._kept:
            self._kept[what, id(x)] = x, make(x)  # with x, so that its number stays its own
        return self._kept[what, id(x)][1]

    def _rows_before(self, bounds: torch.Tensor) -> torch.Tensor:
        """How many of this rank's rows lie before each of these rows."""
        first, last = (
            (bounds - piece.start).clamp(0, piece.stop - piece.start) for piece in self._pieces[self._ranks.rank]
        )
        return first + last

    def _gather(self, own: torch.Tensor) -> torch.Tensor:
        return self._begin_gather(own, at_once=True)()

    def _begin_gather(self, own: torch.Tensor, *, at_once: bool) -> Callable[[], torch.Tensor]:
        # Bytes, as the widest numbers that they make: neither NCCL nor indexing knows all of FP8.
        words = own.contiguous().flatten(1) if own.dim() > 1 else own.contiguous()[:, None]
        words = words.view(torch.uint8)
        words = words.view(torch.int32) if words.shape[1] % 4 == 0 else words
        if len(words) < self._most:
            words = torch.cat((words, words.new_zeros(self._most - len(words), words.shape[1])))
        parts = words.new_empty(self._ranks.size * self._most, words.shape[1])
        work = all_gather(parts, words, group=self._ranks.group, async_op=not at_once)
        dtype, shape, places = own.dtype, own.shape[1:], self._index("_places", own.device)

        def end() -> torch.Tensor:
            if work is not None:
                work.wait()
            return parts[places].view(torch.uint8).view(dtype).view(-1, *shape)

        return end

    def _index(self, name: str, device: torch.device) -> torch.Tensor:
        """Rows' numbers on the device, where they are copied once."""
        index = getattr(self, name)
        if index.device != device:
            index = packing.move(index, device)
            setattr(self, name, index)
        return index
