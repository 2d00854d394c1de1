"""The rows of a pass on several ranks: all of them on each, or where they are many a share on each."""

from itertools import pairwise

import torch
import torch.distributed as dist

from dsa_layers.batch.rows import ALL_ROWS, Rows
from dsa_layers.batch.tokens import Tokens
from dsa_layers.parallel.ranks import Ranks

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
    end: later tokens see more keys, and so all ranks have as many pairs of a query and a key.

    Pieces go from rank to rank directly, as NCCL's and gloo's `all_to_all` sends them, from where they are to where
    they belong. Sums are those of `Ranks.sum`, bit for bit.
    """

    parts = shared = True

    def __init__(self, ranks: Ranks, count: int) -> None:
        self._ranks, self._count = ranks, count
        pieces = 2 * ranks.size
        ends = [count * i // pieces for i in range(pieces + 1)]
        cuts = [slice(*piece) for piece in pairwise(ends)]
        self._pieces = [(cuts[rank], cuts[-1 - rank]) for rank in range(ranks.size)]

    def own(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[piece] for piece in self._pieces[self._ranks.rank]])

    def gather(self, *own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = tuple(x.contiguous() for x in own)
        whole = tuple(x.new_empty(self._count, *x.shape[1:]) for x in own)
        sent, received = [], []
        for x, y in zip(own, whole):
            for mine, piece in zip(self._split(x, self._ranks.rank), self._pieces[self._ranks.rank]):
                y[piece] = mine
                sent += [(mine, peer) for peer in self._others()]
            received += [(y[piece], peer) for peer in self._others() for piece in self._pieces[peer]]
        self._exchange(sent, received)
        return whole

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        part, rank = part.contiguous(), self._ranks.rank
        parts = part.new_empty(self._ranks.size, sum(p.stop - p.start for p in self._pieces[rank]), *part.shape[1:])
        torch.cat([part[piece] for piece in self._pieces[rank]], out=parts[rank])
        sent = [(part[piece], peer) for peer in self._others() for piece in self._pieces[peer]]
        received = [(piece, peer) for peer in self._others() for piece in self._split(parts[peer], rank)]
        self._exchange(sent, received)
        return self._ranks.sum_parts(parts)

    def _others(self) -> list[int]:
        return [peer for peer in range(self._ranks.size) if peer != self._ranks.rank]

    def _split(self, own: torch.Tensor, rank: int) -> tuple[torch.Tensor, ...]:
        """A rank's rows by their pieces."""
        return own.split([piece.stop - piece.start for piece in self._pieces[rank]])

    def _exchange(self, sent: list[tuple[torch.Tensor, int]], received: list[tuple[torch.Tensor, int]]) -> None:
        """All at once. Between two ranks pieces arrive in the order in which they are sent."""
        group = self._ranks.group
        calls = [
            dist.P2POp(call, x.view(torch.uint8), group=group, group_peer=peer)
            for call, pairs in ((dist.isend, sent), (dist.irecv, received))
            for x, peer in pairs
            if x.numel()
        ]
        for work in dist.batch_isend_irecv(calls) if calls else ():
            work.wait()
