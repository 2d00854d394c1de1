"""Context parallelism in training: each rank computes some tokens of packed sequences, and gathers from all ranks the
keys that these tokens see."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from dsa.runtime.checks import integer
from dsa_layers.batch import packing
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.parallel.ranks import Ranks, raise_on_all_ranks


@dataclass(frozen=True)
class Piece:
    """The tokens of `sequence` at positions begin, ..., end - 1."""

    sequence: int
    begin: int
    end: int


@dataclass(frozen=True)
class TokenShare:
    """The tokens of one rank: the early pieces, then the late pieces (`cut`). A sequence has at most one of each."""

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

    A sequence is cut into 2 * size chunks. Rank r gets chunk r, an early piece, and chunk 2 * size - 1 - r, a late
    piece. With causal attention the ranks then have the same number of query-key pairs, except for the remainder of the
    division. The remainder's tokens go to the ranks with the fewest tokens so far, so the ranks' numbers of tokens
    differ by at most one.
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
            if a.end == b.begin:  # join two adjacent pieces
                a, b = Piece(sequence, a.begin, b.end), Piece(sequence, b.end, b.end)
            early[rank] += [a] if a.begin < a.end else []
            late[rank] += [b] if b.begin < b.end else []
    return [TokenShare(tuple(a), tuple(b)) for a, b in zip(early, late)]


@dataclass(frozen=True)
class RowPlan:
    """The rows that a rank gathers. Row i of rank r has index r * most + i: each rank's rows are padded to `most`.

    rows   int64 [N]: indices of the rows to gather
    first  rows[:first] has no duplicates, and neither has rows[first:]
    most   the largest number of rows on a rank
    """

    rows: torch.Tensor
    first: int
    most: int


class _GatherRows(torch.autograd.Function):
    """Gather the rows [N, ...] of this rank's plan from all ranks' x [own rows, ...].

    A row's gradient is the sum of all ranks' gradients for the row. Each rank sends its gradient in x's dtype. The
    gradients are added in fp32 (fp64 for fp64) in the order of the ranks, so every run gives the same bits. All ranks
    must call this function, and run backward, in the same order.
    """

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
        # Each call of index_add_ adds to a row at most once, so the order of its additions does not change the bits.
        for part in (slice(0, plan.first), slice(plan.first, None)):
            sent.index_add_(0, plan.rows[part], grad[part])
        parts = torch.empty_like(sent)
        ranks.all_to_all(parts, sent)
        return ranks.sum_parts(parts.unflatten(0, (ranks.size, plan.most))[:, : ctx.own]), None, None


def _padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.contiguous() if len(x) == rows else torch.cat((x, x.new_zeros(rows - len(x), *x.shape[1:])))


@dataclass(frozen=True, kw_only=True)
class ContextBatch(SequenceBatch):
    """One rank's share of the T tokens of packed sequences (`cut`). `IndexerStage.share` makes this batch, for passes
    within that `IndexerStage`.

    lens                  the lengths of the whole sequences
    query_lens, key_lens  the lengths of this rank's pieces
    positions             int64 [own tokens]: positions in the whole sequences
    shares, ranks         the shares of all ranks, and these ranks

    `gather` returns the keys for this rank's tokens, and `keyed` is the batch with these keys.
    """

    lens: tuple[int, ...]
    shares: tuple[TokenShare, ...]
    ranks: Ranks

    @classmethod
    def of(cls, lens: Sequence[int], ranks: Ranks, device: torch.device | str) -> "ContextBatch":
        """Return this rank's share of sequences with lengths `lens`. All ranks must call this method with equal `lens`.

        Raise ValueError on all ranks if one rank's `lens` has fewer tokens than there are ranks, has a length below 1
        or differs from rank 0's. A rank whose `lens` has a wrong type raises TypeError instead."""
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
        """A batch of this rank's tokens with the keys that `gather` returns."""
        return SequenceBatch(self.query_lens, tuple(piece.end for piece in self._share.pieces), self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        return self.keyed.positions

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of x [T, ...], which has the rows of all sequences one after another. The result has
        the order of the pieces."""
        if x.dim() == 0 or len(x) != sum(self.lens):
            raise ValueError(f"x: must have a row for each of {sum(self.lens)} tokens, got shape {list(x.shape)}")
        return x[self._tokens_of(self._share.pieces)]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Gather from all ranks' x [own tokens, ...] the rows that this rank's tokens can attend to.

        The result [sum(keyed.key_lens), ...] concatenates, for each piece of this rank, the rows of the piece's
        sequence up to the end of the piece. Gradients of a row are summed over all ranks.
        """
        if len(x) != sum(self.query_lens):
            raise ValueError(
                f"x: must have a row for each of this rank's {sum(self.query_lens)} tokens, got shape {list(x.shape)}"
            )
        return x if self.ranks.size == 1 else _GatherRows.apply(x, self._plan, self.ranks)

    def mean(self, values: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """Return size / count * the sum of values [own tokens]. The mean of the ranks' results is the sum of all
        ranks' values, divided by `count`; so DDP and FSDP2, which average gradients over the ranks, give the gradients
        of a single rank with all tokens.

        count  the number of tokens with a target on all ranks; the values of other tokens must be 0. None if all T
               tokens have a target
        """
        count = sum(self.lens) if count is None else integer("count", count, at_least=1, at_most=sum(self.lens))
        if values.shape != (sum(self.query_lens),):
            raise ValueError(
                f"values: must be [{sum(self.query_lens)}], one of each of this rank's tokens, got {list(values.shape)}"
            )
        return values.sum() * (self.ranks.size / count)

    def over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the mean of the ranks' losses, which is equal on all ranks. It has no gradient and is for printing."""
        return self.ranks.sum(loss.detach()[None])[0] / self.ranks.size

    @property
    def weight(self) -> float:
        """size / T * own tokens: `mean(values)` is this factor times values.mean(). It is 1 if all ranks have the same
        number of tokens."""
        return self.ranks.size * sum(self.query_lens) / sum(self.lens)

    @property
    def _share(self) -> TokenShare:
        return self.shares[self.ranks.rank]

    def _tokens_of(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """Return int64 [tokens of the pieces]: the index of each of these tokens among all packed tokens."""
        starts = packing.starts(self.lens)
        begins = [starts[piece.sequence] + piece.begin for piece in pieces]
        ends = [starts[piece.sequence] + piece.end for piece in pieces]
        return packing.ranges(begins, ends, self.device)

    @cached_property
    def _plan(self) -> RowPlan:
        most = max(share.tokens for share in self.shares)
        # row_of[token]: the index of the token's row, as in `RowPlan`
        row_of = torch.empty(sum(self.lens), dtype=torch.int64, device=self.device)
        for rank, share in enumerate(self.shares):
            row_of[self._tokens_of(share.pieces)] = torch.arange(share.tokens, device=self.device) + rank * most
        keys = self._tokens_of([Piece(piece.sequence, 0, piece.end) for piece in self._share.pieces])
        first = sum(piece.end for piece in self._share.early)
        return RowPlan(row_of[keys], first, most)
