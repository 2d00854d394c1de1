"""Context parallelism: ranks share the tokens of packed sequences, and every rank has the keys of all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

from dsa_layers.arguments import integer, shown
from dsa_layers.batch import packing
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.parallel.context_cut import TokenShare, cut
from dsa_layers.parallel.gathered_rows import RowPlan, gather_rows
from dsa_layers.parallel.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class ContextBatch(SequenceBatch):
    """A rank's share of the T tokens of packed sequences, as a pass takes it within an `IndexerStage`, which makes it
    (`IndexerStage.share`): the first and the mirrored last of 2 size chunks of each sequence.

    lens         of the whole sequences
    query_lens,  of the rank's pieces of them, one after the other: what a pass has of each. Attention gathers the keys
    key_lens     that are elsewhere (`gather`), and sees them by `keyed`
    positions    int64 [own tokens]: in the whole sequences
    in_stage     whether passes train indexers now: no other attention gathers

    `own` takes the share of what all ranks have, and `mean` and `over_ranks` make losses of it.
    """

    lens: tuple[int, ...]
    shares: tuple[TokenShare, ...]
    ranks: Ranks
    in_stage: Callable[[], bool]

    @classmethod
    def of(
        cls, lens: Sequence[int], ranks: Ranks, device: torch.device | str, in_stage: Callable[[], bool]
    ) -> "ContextBatch":
        """This rank's share. All ranks must call it: they make sure that their `lens` are the same, and raise the same
        ValueError or TypeError where one of them has lengths that cannot be shared."""
        if not 0 <= ranks.rank < ranks.size:  # torch.distributed has -1 for a process outside of the group
            raise ValueError(f"ranks: this process must be one of its {ranks.size} ranks, got rank {ranks.rank}")
        lens = _agreed(lens, ranks)
        shares = tuple(cut(lens, ranks.size))
        own = tuple(piece.end - piece.begin for piece in shares[ranks.rank].pieces)
        return cls(own, own, torch.device(device), lens=lens, shares=shares, ranks=ranks, in_stage=in_stage)

    @property
    def max_key_len(self) -> int:
        """RuntimeError outside of a stage, where attention would see pieces of sequences."""
        self._check_stage()
        return self.keyed.max_key_len

    @cached_property
    def keyed(self) -> SequenceBatch:
        """The same tokens with the keys that they see: `key_lens` reach from a whole sequence's first token to a
        piece's last, in the rows that `gather` gives."""
        return SequenceBatch(self.query_lens, tuple(piece.end for piece in self._share.pieces), self.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        return self.keyed.positions

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, ...] of all tokens, sequence after sequence -> this rank's rows of it, in the order of its pieces."""
        if x.dim() == 0 or len(x) != sum(self.lens):
            raise ValueError(f"x: must have a row for each of {sum(self.lens)} tokens, got shape {list(x.shape)}")
        return x[self._own_tokens]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [own tokens, ...] of each rank -> [sum(keyed.key_lens), ...], for each piece those of its sequence up to
        the piece's end. A row's gradient is the sum over all ranks (`gather_rows`)."""
        if len(x) != sum(self.query_lens):
            raise ValueError(
                f"x: must have a row for each of this rank's {sum(self.query_lens)} tokens, got shape {list(x.shape)}"
            )
        self._check_stage()
        return x if self.ranks.size == 1 else gather_rows(x, self._plan, self.ranks)

    def _check_stage(self) -> None:
        if not self.in_stage():
            raise RuntimeError("batch: a rank's share of tokens is for passes within the IndexerStage that made it")

    def mean(self, values: torch.Tensor, count: int | None = None) -> torch.Tensor:
        """values [own tokens] -> size / count * their sum, whose mean over the ranks is the mean over `count` tokens of
        all ranks: those whose values are not 0 by definition, as they are without a target; all T tokens if None. So
        its gradients, averaged over the ranks as DDP and FSDP2 do, are those of one rank that has all tokens."""
        count = sum(self.lens) if count is None else integer("count", count, at_least=1, at_most=sum(self.lens))
        if values.shape != (sum(self.query_lens),):
            raise ValueError(
                f"values: must be [{sum(self.query_lens)}], one of each of this rank's tokens, got {list(values.shape)}"
            )
        return values.sum() * (self.ranks.size / count)

    def over_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean of the ranks' losses, the same on all of them, without gradients: what to print."""
        return self.ranks.sum(loss.detach()[None])[0] / self.ranks.size

    @property
    def weight(self) -> float:
        """Of the mean over this rank's tokens: size / T * own tokens, 1 where all ranks have equally many."""
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


def _agreed(lens: Sequence[int], ranks: Ranks) -> tuple[int, ...]:
    """The lengths of sequences, which all ranks must give alike. ValueError or TypeError on all ranks for what one of
    them cannot share."""
    own = _checked(lens, ranks.size)
    every = [own] * ranks.size
    if ranks.size > 1:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("ranks: torch.distributed is not initialised: call init_process_group before")
        dist.all_gather_object(every, own, group=ranks.group)
    for rank, given in enumerate(every):
        if isinstance(given, ValueError | TypeError):
            raise type(given)(f"{given} (on rank {rank})" if ranks.size > 1 else str(given))
        if given != every[0]:
            first, other = _said(every[0]), _said(given)
            raise ValueError(f"lens: must be the same on all ranks, got {first} on rank 0 and {other} on rank {rank}")
    return own


def _checked(lens: Sequence[int], size: int) -> tuple[int, ...] | ValueError | TypeError:
    """The lengths, or what is wrong with them, for all ranks to hear."""
    try:
        own = SequenceBatch.without_cache(lens).query_lens
    except (ValueError, TypeError) as error:
        return error
    if sum(own) < size:
        return ValueError(f"lens: must have at least a token for each of {size} ranks, got {list(own)}")
    return own


def _said(lens: tuple[int, ...]) -> str:
    return f"{len(lens)} of {sum(lens)} tokens, {shown(list(lens))}"
