"""Work tiles of a grouped product: rows of one matrix each, found on the device.

Rows lie one matrix's after another's, and `ends` says where each one's end: no row is padded, and no host reads a
length. Rows behind the last matrix's, if there are such, are in no work tile: tiles are counted by matrix, and what a
tile stores ends where its matrix does. So without rows of any matrix there is no tile, and every CTA ends at once.

The tiles of a matrix come together, in bands of BAND rows: so what is multiplied at a time is of about as many rows as
columns, and the L2 cache holds what several tiles read. Within a band the rows are innermost, if there is one matrix.
Of several, the columns are: a matrix of a few tiles of rows has a last one of few rows, and the scheduler, which deals
tiles out in turn, would give these to every second CTA.
A warp finds the matrix of a work tile by comparing 32 prefix sums at a time.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.reductions import block_exclusive_scan
from dsa.kernels.gemm.limits import MAX_MATRICES

MAX_TILES = 2**30
BAND = 2048
# Tiles of rows before each matrix; behind the last one those of all, 32 times.
PREFIX_SUMS = MAX_MATRICES + 32


class WorkTileInfo(NamedTuple):
    """matrix: its number; row, column: the first of the work tile; end: of the matrix's rows. An end of 0: no tile is
    left."""

    matrix: Int32
    row: Int32
    end: Int32
    column: Int32

    @staticmethod
    def last() -> "WorkTileInfo":
        return WorkTileInfo(*[Int32(0)] * 4)


@dataclass(frozen=True)
class GroupedTiles:
    """ends [matrices]; rows: of the result, the matrices' and those behind them; across: tiles of columns; prefix
    [PREFIX_SUMS] in shared memory; height, width: rows and columns of a tile."""

    ends: cute.Tensor
    rows: Int32
    across: Int32
    prefix: cute.Tensor
    height: cutlass.Constexpr[int]
    width: cutlass.Constexpr[int]

    @property
    def matrices(self) -> Int32:
        return self.ends.shape[0]

    @cute.jit
    def count(self, sums, threads: cutlass.Constexpr, tid, lane, warp) -> Int32:
        """Fill in the prefix sums. -> the tiles of all matrices. Work of all threads of the CTA; sums: 32 Int32 of
        shared memory, zero beyond the CTA's warps."""
        matrices = self.ends.shape[0]
        # Matrices that overlap, as ends that decrease make them, could have more tiles than an int32 holds.
        most = MAX_TILES // self.across
        total = Int32(0)
        for first in cutlass.range(0, matrices, threads, unroll=1):
            e = first + tid
            own = Int32(0)
            if e < matrices:
                begin, end = self.bounds(e)
                own = cute.ceil_div(end - begin, self.height)
            before, of_all = block_exclusive_scan(own, sums, lane, warp)
            if e < matrices:
                self.prefix[e] = cutlass.min(total + before, most)
            total = cutlass.min(total + of_all, most)
            cute.arch.sync_threads()
        if tid < 32:
            self.prefix[matrices + tid] = total
        cute.arch.sync_threads()
        return total * self.across

    @cute.jit
    def bounds(self, e):
        """Where the rows of matrix e begin and end; inside the rows that there are, whatever `ends` says. If its ends
        decrease or are outside it has none, and takes none of the others'; the last may end beyond the rows."""
        begin, end = Int32(0), self.ends[e]
        if e > 0:
            begin = self.ends[e - 1]
        if e == self.ends.shape[0] - 1:
            end = cutlass.min(end, self.rows)
        if begin < 0 or begin > end or end > self.rows:
            begin, end = Int32(0), Int32(0)
        return begin, end

    @cute.jit
    def matrix_of(self, index, e, lane) -> Int32:
        """The matrix of work tile `index`, one of those that there are, not before e."""
        steps = Int32(32)
        while steps == 32:
            # Whether the tile lies behind the beginning of each of the next 32 matrices.
            steps = cute.arch.popc(cute.arch.vote_ballot_sync(self.prefix[e + 1 + lane] * self.across <= index))
            e += steps
        return e

    @cute.jit
    def rows_first(self, index, e, lane) -> WorkTileInfo:
        """Work tile `index`, one of those that there are, whose matrix is not before e: tiles of the same columns are
        neighbours, in one band."""
        e = self.matrix_of(index, e, lane)
        begin, end = self.bounds(e)
        down = cute.ceil_div(end - begin, self.height)
        local = index - self.prefix[e] * self.across
        return WorkTileInfo(e, begin + local % down * self.height, end, local // down * self.width)

    @cute.jit
    def at(self, index, e, total, lane) -> WorkTileInfo:
        """Work tile `index` of `total`, whose matrix is not before e; the last WorkTileInfo, if there is none."""
        row, end, column = Int32(0), Int32(0), Int32(0)
        if index < total:
            e = self.matrix_of(index, e, lane)
            begin, end = self.bounds(e)
            down = cute.ceil_div(end - begin, self.height)
            local = index - self.prefix[e] * self.across
            tiles = BAND // self.height
            band = local // (tiles * self.across) * tiles
            local -= band * self.across
            of_band = cutlass.min(down - band, tiles)
            several = self.ends.shape[0] > 1
            inner = self.across if several else of_band
            outer, rest = local // inner, local % inner
            row = begin + (band + (outer if several else rest)) * self.height
            column = (rest if several else outer) * self.width
        return WorkTileInfo(e, row, end, column)


@dataclass(frozen=True)
class OneMatrixTiles:
    """The same of a single matrix, all of whose `rows` are its: there is nothing to read or to count."""

    rows: Int32
    across: Int32
    height: cutlass.Constexpr[int]
    width: cutlass.Constexpr[int]

    matrices = 1

    @cute.jit
    def count(self) -> Int32:
        """The tiles that there are."""
        return cute.ceil_div(self.rows, self.height) * self.across

    @cute.jit
    def rows_first(self, index, e, lane) -> WorkTileInfo:
        """Work tile `index`: tiles of the same columns are neighbours."""
        down = cute.ceil_div(self.rows, self.height)
        return WorkTileInfo(e, index % down * self.height, self.rows, index // down * self.width)

    @cute.jit
    def at(self, index, e, total, lane) -> WorkTileInfo:
        """Work tile `index` of `total`; the last WorkTileInfo, if there is none."""
        row, end, column = Int32(0), Int32(0), Int32(0)
        if index < total:
            end = self.rows
            tiles = BAND // self.height
            band = index // (tiles * self.across) * tiles
            local = index - band * self.across
            of_band = cutlass.min(cute.ceil_div(end, self.height) - band, tiles)
            row = (band + local % of_band) * self.height
            column = local // of_band * self.width
        return WorkTileInfo(e, row, end, column)


def expected_tiles(rows: int, matrices: int, each: int) -> float:
    """Of `each` rows, that a matrix has if `rows` find theirs at random: the sum over j of P(more than j * each)."""
    mean = rows / matrices
    if matrices == 1 or mean > 8 * each:
        return math.ceil(mean / each)
    chance, at_most, tiles = math.exp(-mean), 0.0, 0.0
    for i in range(16 * each):
        at_most += chance
        if i % each == 0:
            tiles += 1 - at_most
        chance *= mean / (i + 1)
    return tiles
