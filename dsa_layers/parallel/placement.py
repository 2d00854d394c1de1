"""The distribution of a pass's rows over several ranks: each rank has all rows, or in a long prefill a shard."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from dsa_layers.batch.placement import WHOLE, Placement
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.parallel.ranks import Ranks, check_no_gradient

SHARDED_TOKENS = 256  # the smallest number of new tokens for which a prefill is `Sharded`
MOST_CACHED = 100  # the largest number of results that a `Sharded` caches; one pass needs fewer


def placement_of(batch: TokenBatch, ranks: Ranks) -> Placement:
    """Return the placement of a pass. All layers of a sharded pass get the same object, which caches rows for them."""
    if ranks.size == 1:
        return WHOLE
    count = sum(batch.query_lens)
    if batch.is_decode or count < SHARDED_TOKENS:
        return Replicated(ranks)
    placement = vars(batch).get("placement")
    if placement is None or placement._ranks != ranks:
        placement = vars(batch)["placement"] = Sharded(ranks, count)
    return placement


class Replicated(Placement):
    """Placement in which every rank has all rows, for decoding and short prefills. With few rows, norms and elementwise
    layers cost little, although every rank repeats them."""

    is_split = True

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        return self._ranks.sum(part)

    def reduce_experts(
        self, y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._ranks.sum_of_experts(y, rows, weights, shared)


class Sharded(Placement):
    """Placement in which each rank has a shard of the rows. With N ranks, the rows are cut into 2 N pieces of nearly
    equal length, and rank r has pieces r and 2 N - 1 - r. With one causal sequence, all ranks then have nearly the same
    number of query-key pairs.

    `reduce` gives the same bits as `Ranks.sum`. On GPUs, the `start_` methods run a collective on a separate stream,
    with copies between GPUs (`peer_copies`) or with NCCL. The function that these methods return makes the current
    stream wait for this collective.
    """

    is_split = sharded = True

    def __init__(self, ranks: Ranks, count: int) -> None:
        self._ranks, self.count, pieces = ranks, count, 2 * ranks.size
        ends = [count * i // pieces for i in range(pieces + 1)]
        cuts = [slice(*piece) for piece in pairwise(ends)]
        self.pieces = [(cuts[rank], cuts[-1 - rank]) for rank in range(ranks.size)]
        self._counts = [sum(piece.stop - piece.start for piece in own) for own in self.pieces]
        self._most = max(self._counts)
        # The pieces in the order of all rows: (rank that has the piece, slice of the piece in that rank's local rows).
        firsts = [own[0].stop - own[0].start for own in self.pieces]
        early = [(rank, slice(0, first)) for rank, first in enumerate(firsts)]
        late = [(rank, slice(first, self._counts[rank])) for rank, first in enumerate(firsts)]
        self._order = [*early, *reversed(late)]
        self._cached: dict[tuple[str, int], tuple[Any, Any]] = {}

    def local(self, x: torch.Tensor) -> torch.Tensor:
        if x.stride(0) == 0:  # x is one expanded row, so all rows are equal
            return x[: self._counts[self._ranks.rank]]
        return torch.cat([x[piece] for piece in self.pieces[self._ranks.rank]])

    def local_cached(self, x: Any) -> Any:
        return self._cache("local", x, self._local_of)

    def local_bounds(self, bounds: torch.Tensor) -> torch.Tensor:
        return self._cache("bounds", bounds, self._rows_before)

    def all_gather(self, *local: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._start_all_gather(local, at_once=True)()

    def start_all_gather(self, *local: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
        return self._start_all_gather(local, at_once=False)

    def reduce(self, part: torch.Tensor) -> torch.Tensor:
        return self._start_reduce(part, at_once=True)()

    def start_reduce(self, part: torch.Tensor) -> Callable[..., torch.Tensor]:
        return self._start_reduce(part, at_once=False)

    def _start_reduce(self, part: torch.Tensor, *, at_once: bool) -> Callable[..., torch.Tensor]:
        check_no_gradient(part)
        own, size = self._counts[self._ranks.rank], self._ranks.size
        dtype, shape = part.dtype, part.shape[1:]
        copies = self._ranks.copies(part)
        if copies is None:
            sent = torch.cat([part[piece] for own in self.pieces for piece in own])
            parts = part.new_empty(size * own, *shape)
            work = self._ranks.all_to_all(parts, sent, [own] * size, self._counts, async_op=not at_once)
            receive = partial(_when_done, work, parts)
        else:
            part = part.contiguous()
            row = part[:1].nbytes
            receive = copies.begin(
                [[part[piece] for piece in pieces] for pieces in self.pieces], [count * row for count in self._counts]
            )

        def end(shared: torch.Tensor | None = None, residual: torch.Tensor | None = None) -> torch.Tensor:
            parts = receive().view(-1).view(dtype).view(size, own, *shape)
            return self._ranks.sum_parts(parts, shared, residual)

        return end

    def _local_of(self, x: Any) -> Any:
        return type(x)(map(self.local_cached, x)) if isinstance(x, tuple) else self.local(x)

    def _cache(self, what: str, x: Any, make: Callable[[Any], Any]) -> Any:
        """Return make(x), and cache it for this x. what: a name for `make`."""
        if (what, id(x)) not in self._cached:
            if len(self._cached) >= MOST_CACHED:  # only after several passes over the same batch
                self._cached.clear()
            self._cached[what, id(x)] = x, make(x)  # the entry holds x, so that no other tensor gets the id of x
        return self._cached[what, id(x)][1]

    def _rows_before(self, bounds: torch.Tensor) -> torch.Tensor:
        """Return the number of local rows before each row in `bounds`."""
        first, last = (
            (bounds - piece.start).clamp(0, piece.stop - piece.start) for piece in self.pieces[self._ranks.rank]
        )
        return first + last

    def _start_all_gather(
        self, local: tuple[torch.Tensor, ...], *, at_once: bool
    ) -> Callable[[], tuple[torch.Tensor, ...]]:
        """Start to gather all tensors in one message, which saves host time. Return the function that finishes the
        gather."""
        if not local:
            return lambda: ()
        check_no_gradient(*local)
        shapes = [(x.dtype, x.shape[1:]) for x in local]
        flat = [x.contiguous().view(-1) for x in local]
        count = self._counts[self._ranks.rank]
        # Compute bytes per row from the shapes, because `local` may have no rows.
        widths = [shape.numel() * dtype.itemsize for dtype, shape in shapes]
        # NCCL and `torch.cat` are faster with int32 than with uint8.
        word = torch.int32 if all(width % 4 == 0 for width in widths) else torch.uint8
        words, widths = [x.view(word) for x in flat], [width // word.itemsize for width in widths]
        row = sum(widths)
        copies = self._ranks.copies(words[0])
        if copies is None:
            sent = words[0]
            if len(words) > 1 or count < self._most:
                sent = sent.new_empty(self._most * row)
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

    def _in_order(self, parts: torch.Tensor, local: torch.Tensor, before: int, width: int) -> torch.Tensor:
        """Return all rows of one tensor in order, as words: elements of int32 or uint8.

        parts   the ranks' messages, which have equal lengths
        local   this rank's rows of the tensor
        before  words per row of the tensors that precede this tensor in a message
        width   words per row of this tensor
        """
        pieces, of_rank = [], len(parts) // self._ranks.size
        for rank, piece in self._order:
            if rank == self._ranks.rank:
                pieces.append(local[piece.start * width : piece.stop * width])
            else:
                first = rank * of_rank + before * self._counts[rank]
                pieces.append(parts[first + piece.start * width : first + piece.stop * width])
        return torch.cat(pieces)


def _when_done(work: dist.Work | None, parts: torch.Tensor) -> torch.Tensor:
    if work is not None:
        work.wait()
    return parts
