"""The rows of a pass on several ranks: all of them on each, or where they are many a share on each."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from dsa_layers.batch.rows import ALL_ROWS, Kept, Rows
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.parallel.ranks import Ranks, check_no_gradient

# New tokens of a pass from which on each rank has its own share of the rows between layers.
SHARED_ROWS = 256
# Tensors of which `SharedRows` keeps this rank's rows. A pass has fewer.
MOST_KEPT = 100


def rows_of(batch: TokenBatch, ranks: Ranks) -> Rows:
    """How the rows of a pass lie on the ranks. All layers get the same object, which keeps rows that several read."""
    if ranks.size == 1:
        return ALL_ROWS
    count = sum(batch.query_lens)
    if not ranks.shares_rows or batch.is_decode or count < SHARED_ROWS:
        return WholeRows(ranks)
    rows = vars(batch).get("shared_rows")
    if rows is None or rows._ranks != ranks:
        rows = vars(batch)["shared_rows"] = SharedRows(ranks, count)
    return rows


class WholeRows(Rows):
    """Every rank has all rows: what layers compute between products is little then, and what is said costs its latency
    alone, one time a sum."""

    parts = True

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return self._ranks.sum(part)

    def sum_of_experts(
        self, y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._ranks.sum_of_experts(y, rows, weights, shared)


class SharedRows(Rows):
    """Each rank has two pieces of the rows, of 2 N about equal ones the one of its number and the one as far from the
    end: later tokens see more keys, and so all ranks have as many pairs of a query and a key. Sums are those of
    `Ranks.sum`, bit for bit. What is begun goes beside the rank's own work, by copies (`peer_copies`) or by NCCL, in
    streams of their own, which the end makes the rank's stream wait for."""

    parts = shared = True

    def __init__(self, ranks: Ranks, count: int) -> None:
        self._ranks, self.count, pieces = ranks, count, 2 * ranks.size
        ends = [count * i // pieces for i in range(pieces + 1)]
        cuts = [slice(*piece) for piece in pairwise(ends)]
        self._pieces = [(cuts[rank], cuts[-1 - rank]) for rank in range(ranks.size)]
        self._counts = [sum(piece.stop - piece.start for piece in own) for own in self._pieces]
        self._most = max(self._counts)
        # Of all rows in their order: the rank that has a piece, and where that lies among the rank's own.
        firsts = [own[0].stop - own[0].start for own in self._pieces]
        early = [(rank, slice(0, first)) for rank, first in enumerate(firsts)]
        late = [(rank, slice(first, self._counts[rank])) for rank, first in enumerate(firsts)]
        self._order = [*early, *reversed(late)]
        self._kept: dict[tuple[str, int], tuple[Any, Any]] = {}

    def own(self, x: torch.Tensor) -> torch.Tensor:
        if x.stride(0) == 0:  # of a list that all tokens share, one row stays in memory
            return x[: self._counts[self._ranks.rank]]
        return torch.cat([x[piece] for piece in self._pieces[self._ranks.rank]])

    def own_kept(self, x: Kept) -> Kept:
        return self._keep("own", x, self._own_of)

    def own_bounds(self, bounds: torch.Tensor) -> torch.Tensor:
        return self._keep("bounds", bounds, self._rows_before)

    def pieces(self, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The two pieces of this rank's rows."""
        return own.split([piece.stop - piece.start for piece in self._pieces[self._ranks.rank]])

    def gather(self, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._begin_gather(own, at_once=True)()

    def begin_gather_joined(self, *own: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        of_dtypes: dict[torch.dtype, list[torch.Tensor]] = {}
        for x in own:
            of_dtypes.setdefault(x.dtype, []).append(x)
        gathering = self.begin_gather(*(xs[0] if len(xs) == 1 else torch.cat(xs, -1) for xs in of_dtypes.values()))
        widths = {dtype: [x.shape[-1] for x in xs] for dtype, xs in of_dtypes.items()}
        dtypes = [x.dtype for x in own]

        def end() -> tuple[torch.Tensor, ...]:
            parts = {whole.dtype: iter(whole.split(widths[whole.dtype], -1)) for whole in gathering()}
            return tuple(next(parts[dtype]) for dtype in dtypes)

        return end

    def begin_gather(self, *own: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        return self._begin_gather(own, at_once=False)

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        return self._begin_sum(part, at_once=True)()

    def begin_sum(self, part: torch.Tensor) -> Callable[..., torch.Tensor]:
        return self._begin_sum(part, at_once=False)

    def _begin_sum(self, part: torch.Tensor, *, at_once: bool) -> Callable[..., torch.Tensor]:
        check_no_gradient(part)
        own, size = self._counts[self._ranks.rank], self._ranks.size
        dtype, shape = part.dtype, part.shape[1:]
        copies = self._ranks.copies(part)
        if copies is None:
            sent = torch.cat([part[piece] for own in self._pieces for piece in own])
            parts = part.new_empty(size * own, *shape)
            work = self._ranks.all_to_all(parts, sent, [own] * size, self._counts, async_op=not at_once)
            receive = partial(_when_done, work, parts)
        else:
            part = part.contiguous()
            row = part[:1].nbytes
            receive = copies.begin(
                [[part[piece] for piece in pieces] for pieces in self._pieces], [count * row for count in self._counts]
            )

        def end(shared: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
            parts = receive().view(-1).view(dtype).view(size, own, *shape)
            return self._ranks.sum_parts(parts, shared, residual)

        return end

    def _own_of(self, x: Kept) -> Kept:
        return type(x)(map(self.own_kept, x)) if isinstance(x, tuple) else self.own(x)

    def _keep(self, what: str, x: Kept, make: Callable[[Kept], Kept]) -> Kept:
        """what: `make` makes of x."""
        if (what, id(x)) not in self._kept:
            if len(self._kept) >= MOST_KEPT:  # of earlier passes over the same batch
                self._kept.clear()
            self._kept[what, id(x)] = x, make(x)  # with x, so that its number stays its own
        return self._kept[what, id(x)][1]

    def _rows_before(self, bounds: torch.Tensor) -> torch.Tensor:
        """How many of this rank's rows lie before each of these rows."""
        first, last = (
            (bounds - piece.start).clamp(0, piece.stop - piece.start) for piece in self._pieces[self._ranks.rank]
        )
        return first + last

    def _begin_gather(self, own: tuple[torch.Tensor, ...], *, at_once: bool) -> Callable[[], tuple[torch.Tensor, ...]]:
        """All tensors in one message, whose time on the host is that of many kernels: bytes of one behind those of the
        other, so that what lies in a row of all, or of a rank, is one copy from there."""
        if not own:
            return lambda: ()
        check_no_gradient(*own)
        shapes = [(x.dtype, x.shape[1:]) for x in own]
        flat = [x.contiguous().view(-1) for x in own]
        count = self._counts[self._ranks.rank]
        widths = [shape.numel() * dtype.itemsize for dtype, shape in shapes]  # bytes of a row, also of a rank without
        # Fewer and wider numbers, and those that NCCL and `cat` know.
        word = torch.int32 if all(width % 4 == 0 for width in widths) else torch.uint8
        words, widths = [x.view(word) for x in flat], [width // word.itemsize for width in widths]
        row = sum(widths)
        copies = self._ranks.copies(words[0])
        if copies is None:
            sent = words[0]
            if len(words) > 1 or count < self._most:
                sent = sent.new_empty(self._most * row)  # what is behind the own rows nobody reads
                torch.cat(words, out=sent[: count * row])
            parts = sent.new_empty(self._ranks.size * len(sent))
            work = self._ranks.all_gather(parts, sent, async_op=not at_once)
            receive = partial(_when_done, work, parts)
        else:
            to_all = [() if rank == self._ranks.rank else words for rank in range(self._ranks.size)]
            receive = copies.begin(to_all, [self._most * row * word.itemsize] * self._ranks.size)

        def end() -> tuple[torch.Tensor, ...]:
            parts = receive().view(word)
            befores = accumulate(widths, initial=0)
            every = (self._in_order(parts, *of_one) for of_one in zip(words, befores, widths))
            return tuple(x.view(dtype).view(-1, *shape) for x, (dtype, shape) in zip(every, shapes))

        return end

    def _in_order(self, parts: torch.Tensor, own: torch.Tensor, before: int, width: int) -> torch.Tensor:
        """All rows of `width` words: this rank's own, and those of others from the ranks' parts of equal length, one
        behind the other, in each of which `before` words of each of its rows come first."""
        pieces, of_rank = [], len(parts) // self._ranks.size
        for rank, piece in self._order:
            if rank == self._ranks.rank:
                pieces.append(own[piece.start * width : piece.stop * width])
            else:
                first = rank * of_rank + before * self._counts[rank]
                pieces.append(parts[first + piece.start * width : first + piece.stop * width])
        return torch.cat(pieces)


def _when_done(work: dist.Work | None, parts: torch.Tensor) -> torch.Tensor:
    if work is not None:
        work.wait()
    return parts
