"""Context parallelism in training: ranks share the tokens of packed sequences, and gather the keys of all of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from dsa_layers.arguments import integer
from dsa_layers.batch import packing
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.parallel.process_group import raise_on_all_ranks
from dsa_layers.parallel.ranks import Ranks


@dataclass(frozen=True)
class Piece:
    """The tokens of `sequence` at positions begin, ..., end - 1. The last one sees `end` keys."""

    sequence: int
    begin: int
    end: int


@dataclass(frozen=True)
class TokenShare:
    """A rank's tokens: its early pieces, then its late ones, at most one of each kind per sequence."""

    early: tuple[Piece, ...]
    late: tuple[Piece, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.early + self.late

    @property
    def tokens(self) -> int:
        return sum(piece.end - piece.begin for piece in self.pieces)


def cut(lens: Sequence[int], size: int) -> list[TokenShare]:
    """Distribute the tokens of sequences of these lengths over `size` ranks, each token to one rank.

    A sequence is cut into 2 size chunks, and rank r gets chunks r and 2 size - 1 - r. A causal token sees all tokens
    before it, so the work of contiguous shares would differ by a factor of up to 2 size - 1. With an early and a late
    chunk, every rank has the same number of pairs of a query and a key. The ranks' numbers of tokens differ by at most
    one: the remainder of a sequence goes to the ranks with the fewest tokens so far.
    """
    early: list[list[Piece]] = [[] for _ in range(size)]
    late: list[list[Piece]] = [[] for _ in range(size)]
    tokens = [0] * size
    for sequence, length in enumerate(lens):
        chunk, rest = divmod(length, 2 * size)
        one_each, rest = divmod(rest, size)
        fewest = sorted(range(size), key=lambda rank: tokens[rank])[:rest]
        first, second = [chunk + one_each] * size, [chunk] * size
        for rank in fewest:
            (second if one_each else first)[rank] += 1
        begin, end = 0, length
        for rank in range(size):
            a, b = Piece(sequence, begin, begin + first[rank]), Piece(sequence, end - second[rank], end)
            begin, end = a.end, b.begin
            tokens[rank] += first[rank] + second[rank]
            if a.end == b.begin:  # adjacent pieces are one
                a, b = Piece(sequence, a.begin, b.end), Piece(sequence, b.end, b.end)
            early[rank] += [a] if a.begin < a.end else []
            late[rank] += [b] if b.begin < b.end else []
    return [TokenShare(tuple(a), tuple(b)) for a, b in zip(early, late)]


@dataclass(frozen=True)
class RowPlan:
    """The rows that a rank gathers. Each rank's rows are padded to `most`: row i of rank r is row r * most + i of all.

    rows   int64 [N], on the device: the rows to gather, each at most twice
    first  the first `first` rows are different ones, and so are the remaining rows
    """

    rows: torch.Tensor
    first: int
    most: int


def gather_rows(x: torch.Tensor, plan: RowPlan, ranks: Ranks) -> torch.Tensor:
    """x [own, ...] of each rank -> the rows [N, ...] of this rank's plan.

    A row's gradient is the sum of all ranks' gradients, which are rounded to x's dtype and added in fp32 (fp64 for
    fp64) in the order of the ranks: the same bits in every run. All ranks must call this, and run backward, in the same
    order.
    """
    return _GatherRows.apply(x, plan, ranks)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, plan: RowPlan, ranks: Ranks) -> torch.Tensor:
        ctx.plan, ctx.ranks, ctx.own = plan, ranks, len(x)
        parts = x.new_empty(ranks.size * plan.most, *x.shape[1:])
        ranks.all_gather(parts, _padded(x, plan.most))
        return parts.index_select(0, plan.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        plan, ranks = ctx.plan, ctx.ranks
        sent = grad.new_zeros(ranks.size * plan.most, *grad.shape[1:])
        # The rows of one call are different ones, so the order of the additions does not matter.
        for part in (slice(0, plan.first), slice(plan.first, None)):
            sent.index_add_(0, plan.rows[part], grad[part])
        parts = torch.empty_like(sent)
        ranks.all_to_all(parts, sent)
        return ranks.sum_parts(parts.unflatten(0, (ranks.size, plan.most))[:, : ctx.own]), None, None


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.contiguous() if len(x) == rows else torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))


@dataclass(frozen=True, kw_only=True)
class ContextBatch(SequenceBatch):
    """A rank's share of the T tokens of packed sequences, for passes within the `IndexerStage` that made it
    (`IndexerStage.share`). It has the chunks that `cut` gives to the rank.

    lens         the lengths of the whole sequences
    query_lens,  the lengths of this rank's pieces. Attention gathers the other keys (`gather`) and sees them by `keyed`
    key_lens
    positions    int64 [own tokens]: positions in the whole sequences

    `own` selects this rank's rows of a tensor for all tokens. `mean` and `over_ranks` compute losses.
    """

    lens: tuple[int, ...]
    shares: tuple[TokenShare, ...]
    ranks: Ranks

    @classmethod
    def of(cls, lens: Sequence[int], ranks: Ranks, device: torch.device | str) -> "ContextBatch":
        """Return this rank's share. All ranks must call this: they compare their `lens`, and all raise the same
        ValueError or TypeError if one of them has other or unsuitable lengths."""
        if not 0 <= ranks.rank < ranks.size:  # torch.distributed has -1 for a process outside of the group
            raise ValueError(f"ranks: this process must be one of its {ranks.size} ranks, got rank {ranks.rank}")
        if ranks.size > 1 and not dist.is_initialized():
            raise RuntimeError("ranks: torch.distributed is not initialised: call init_process_group before")
        with raise_on_all_ranks(ranks) as facts:
            lens = facts["lens"] = SequenceBatch.without_cache(lens).query_lens
            if sum(lens) < ranks.size:
                raise ValueError(f"lens: must have at least a token for each of {ranks.size} ranks, got {list(lens)}")
        shares = tuple(cut(lens, ranks.size))
        own = tuple(piece.end - piece.begin for piece in shares[ranks.rank].pieces)
        return cls(own, own, torch.device(device), lens=lens, shares=shares, ranks=ranks)

    @property
    def max_key_len(self) -> int:
        return self.keyed.max_key_len

    @cached_property
    def keyed(self) -> SequenceBatch:
        """The same tokens with all keys that they see. The keys of a piece are the tokens of its sequence up to the
        piece's end, in the rows that `gather` returns."""
        return SequenceBatch(self.query_lens, tuple(piece.end for piece in self._share.pieces), self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        return self.keyed.positions

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, ...] of all tokens, sequence after sequence -> this rank's rows, in the order of its pieces."""
        if x.dim() == 0 or len(x) != sum(self.lens):
            raise ValueError(f"x: must have a row for each of {sum(self.lens)} tokens, got shape {list(x.shape)}")
        return x[self._own_tokens]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [own tokens, ...] of each rank -> [sum(keyed.key_lens), ...]: for each piece, the rows of its sequence up
        to the piece's end. A row's gradient is the sum over all ranks (`gather_rows`)."""
        if len(x) != sum(self.query_lens):
            raise ValueError(
                f"x: must have a row for each of this rank's {sum(self.query_lens)} tokens, got shape {list(x.shape)}"
            )
        return x if self.ranks.size == 1 else gather_rows(x, self._plan, self.ranks)

    def mean(self, values: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """values [own tokens] -> size / count * their sum. The mean of this over the ranks is the mean over `count`
        tokens, or over all T for None. count: the tokens of all ranks that have a target, if the others' values are 0.
        Its gradients, averaged over the ranks as DDP and FSDP2 do, are those of one rank that has all tokens."""
        count = sum(self.lens) if count is None else integer("count", count, at_least=1, at_most=sum(self.lens))
        if values.shape != (sum(self.query_lens),):
            raise ValueError(
                f"values: must be [{sum(self.query_lens)}], one of each of this rank's tokens, got {list(values.shape)}"
            )
        return values.sum() * (self.ranks.size / count)

    def over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean of the ranks' losses, the same on all ranks, without gradients: for printing."""
        return self.ranks.sum(loss.detach()[None])[0] / self.ranks.size

    @property
    def weight(self) -> float:
        """The weight of the mean over this rank's tokens: size / T * own tokens. It is 1 if all ranks have equally
        many."""
        return self.ranks.size * sum(self.query_lens) / sum(self.lens)

    @property
    def _share(self) -> TokenShare:
        return self.shares[self.ranks.rank]

    @cached_property
    def _own_tokens(self) -> torch.Tensor:
        begins = packing.starts(self.lens)
        pieces = [(begins[p.sequence] + p.begin, begins[p.sequence] + p.end) for p in self._share.pieces]
        return packing.ranges(*zip(*pieces), self.device)

    @cached_property
    def _plan(self) -> RowPlan:
        begins, most = packing.starts(self.lens), max(share.tokens for share in self.shares)
        row_of = torch.empty(sum(self.lens), dtype=torch.int64)  # of each token among the ranks' rows
        for rank, share in enumerate(self.shares):
            row = rank * most
            for piece in share.pieces:
                begin, count = begins[piece.sequence] + piece.begin, piece.end - piece.begin
                torch.arange(row, row + count, out=row_of[begin : begin + count])
                row += count
        rows = torch.cat([row_of[begins[p.sequence] :][: p.end] for p in self._share.pieces])
        if self.device.type == "cuda":
            rows = rows.pin_memory()
        first = sum(piece.end for piece in self._share.early)
        return RowPlan(rows.to(self.device, non_blocking=True), first, most)
