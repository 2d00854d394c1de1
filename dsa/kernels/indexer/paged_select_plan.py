"""Sizes of the scores and selection over a paged cache in one kernel, and how many sequences a launch takes."""

from dataclasses import dataclass

from dsa.cute.sm90 import SHARED_BYTES, WARP, WARPGROUP
from dsa.kernels.indexer.score_tile import TILE

MAX_SEQUENCES = WARP  # of a launch: a lane each
MAX_CTAS = 144  # that have a sequence together; no Hopper GPU has more multiprocessors
# Digits of a score, from the first: how many values they have, and which bits of it are behind them.
BINS, SHIFTS = (4096, 1024, 1024), (20, 10, 0)
HEADER = 32
# Words of a query's workspace: header, counts of the digits, two numbers of each CTA, and the list.
ROW_WORDS = 8192
FIRST_BIN = tuple(HEADER + sum(BINS[:level]) for level in range(len(BINS)))
FIRST_CTA = HEADER + sum(BINS)
FIRST_ENTRY = FIRST_CTA + 2 * MAX_CTAS
ENTRIES = ROW_WORDS - FIRST_ENTRY


@dataclass(frozen=True)
class PagedSelectConfig:
    """stages: key tiles in flight for each warpgroup; groups: consumer warpgroups, a power of two."""

    stages: int
    groups: int

    @property
    def threads(self) -> int:
        return (self.groups + 1) * WARPGROUP

    def capacity(self, columns: int, next_n: int, half: bool) -> int:
        """Keys whose scores a CTA has room for, of 128 channels: a multiple of a tile."""
        factors = 4 * columns if half else 0
        tiles = self.groups * self.stages
        keys = max(tiles * TILE * 128, teams_of(self.groups * WARPGROUP, next_n) * 4 * BINS[0])
        used = columns * 132 + factors + keys + 4 * TILE * tiles + 4 * 1024
        return (SHARED_BYTES - used) // (4 * next_n) // TILE * TILE


def teams_of(threads: int, queries: int) -> int:
    """How many queries are selected side by side, each by a power of two of threads, at least a warpgroup."""
    most = min(queries, threads // WARPGROUP)
    return 1 << (most.bit_length() - 1)


def choose_config(heads: int, next_n: int, half: bool) -> PagedSelectConfig:
    columns = heads * next_n
    if columns > 96:
        return PagedSelectConfig(stages=3, groups=2)
    return PagedSelectConfig(stages=2, groups=4)


def sequences_of_launch(most_keys: int, capacity: int, ctas: int) -> int:
    """How many sequences of up to `most_keys` keys a launch of so many CTAs has room for; 0: not even one.

    A sequence of t tiles, of n in all, gets at least (ctas - B) t / n CTAs of B sequences, so none of its CTAs has more
    tiles than B times the most over ctas - B.
    """
    tiles, room = -(-most_keys // TILE), capacity // TILE
    for sequences in range(min(MAX_SEQUENCES, ctas - 1), 0, -1):
        if -(-sequences * tiles // (ctas - sequences)) <= room:
            return sequences
    return 0
