"""Which tokens of packed sequences each rank computes, where several ranks share them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """The tokens of `sequence` from position `begin` up to `end`, without it. Their last one sees `end` keys."""

    sequence: int
    begin: int
    end: int


@dataclass(frozen=True)
class TokenShare:
    """A rank's tokens: the early pieces of all sequences, then the late ones. None of either kind share a sequence."""

    early: tuple[Piece, ...]
    late: tuple[Piece, ...]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return self.early + self.late

    @property
    def tokens(self) -> int:
        return sum(piece.end - piece.begin for piece in self.pieces)


def cut(lens: Sequence[int], size: int) -> list[TokenShare]:
    """The shares of `size` ranks, which have the tokens of sequences of these lengths, each exactly once.

    A sequence comes apart into 2 size chunks, and rank r has chunk r and chunk 2 size - 1 - r. A causal token sees all
    tokens before it, so that contiguous shares of one sequence would differ in work by a factor of up to 2 size - 1.
    Early and late chunks together see the same number of keys on every rank, in each sequence, wherever it lies.
    Numbers of tokens differ by at most one: what is left of a sequence goes to the ranks that have the fewest by then.
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
            if a.end == b.begin:  # nothing lies between them
                a, b = Piece(sequence, a.begin, b.end), Piece(sequence, b.end, b.end)
            early[rank] += [a] if a.begin < a.end else []
            late[rank] += [b] if b.begin < b.end else []
    return [TokenShare(tuple(a), tuple(b)) for a, b in zip(early, late)]
