"""Work tiles of a product with one or several matrices, computed on the device. A tile has rows of one matrix only.

Rows ends[e - 1] to ends[e] - 1 of the product belong to matrix e (from row 0 on for e = 0). Matrices have no padding
between them, and the host does not read `ends`. Rows after the last matrix's rows belong to no work tile, because tiles
are counted per matrix, and a tile stores only rows of its matrix. If no matrix has rows, there is no tile and every CTA
exits at once.

The tiles of a matrix are consecutive. Small-M products use the order of `rows_first`, in which tiles with the same
columns are consecutive. The other products use the order of `at`, which has bands of BAND rows. So the tiles that run
at the same time cover about as many rows as columns, and operands that several of them read stay in the L2 cache.
Within a band, tiles with the same columns are consecutive if there is one matrix; with several matrices, tiles with the
same rows are consecutive. The reason is that a matrix's last tile of rows can have few rows. Suppose that a matrix has
two tiles of rows. If they alternated, a static scheduler would give all tiles with few rows to one half of the CTAs.
A warp finds the matrix of a work tile by comparing 32 prefix sums at a time.

With static scheduling, CTA i of n computes the tiles i, i + n and so on. If work tiles take different times, because
the last tile of a matrix can have few rows, CTAs get ahead of one another. Then weights that two tiles read can have
left the L2 cache before the second tile reads them. With dynamic scheduling a CTA gets the next tile when it becomes
free, so consecutive tiles are computed at about the same time.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.cute.reductions import block_exclusive_scan
from dsa.cute.tile_counter import draw
from dsa.kernels.gemm.limits import MAX_MATRICES

MAX_TILES = 2**30
BAND = 2048  # rows per band
# Elements of `prefix`. Element e is the number of tiles of rows before matrix e: `height` rows of one matrix, over all
# columns. The total follows 32 times, so that a warp can always compare 32 elements.
PREFIX_SUMS = MAX_MATRICES + 32


class WorkTileInfo(NamedTuple):
    """A work tile. An `end` of 0 means that no tile is left.

    matrix  index of the tile's matrix
    row     the tile's first row in the result
    end     end of the matrix's rows in the result
    column  the tile's first column
    """

    matrix: Int32
    row: Int32
    end: Int32
    column: Int32

    @staticmethod
    def last() -> "WorkTileInfo":
        return WorkTileInfo(*[Int32(0)] * 4)


@dataclass(frozen=True)
class GroupedTiles:
    """The tiles of several matrices.

    ends    [matrices]: end of each matrix's rows
    rows    rows of the result, including those after the last matrix
    across  number of tiles per row of tiles
    sums    int32 [32] in shared memory, for the block scan
    prefix  int32 [PREFIX_SUMS] in shared memory
    height  rows of a tile
    width   columns of a tile
    """

    ends: cute.Tensor
    rows: Int32
    across: Int32
    sums: cute.Tensor
    prefix: cute.Tensor
    height: cutlass.Constexpr[int]
    width: cutlass.Constexpr[int]

    @property
    def matrices(self) -> Int32:
        return self.ends.shape[0]

    @cute.jit
    def clear(self, tid):
        """Zero the memory that `count` needs. The CTA's first warp calls this, before a barrier."""
        self.sums[tid] = 0

    @cute.jit
    def count(self, threads: cutlass.Constexpr, tid, lane, warp) -> Int32:
        """Compute the prefix sums. -> the number of tiles of all matrices. All threads of the CTA call this."""
        matrices = self.ends.shape[0]
        # With decreasing ends, matrices overlap, and the sum could overflow an int32.
        most = MAX_TILES // self.across
        total = Int32(0)
        for first in cutlass.range(0, matrices, threads, unroll=1):
            e = first + tid
            own = Int32(0)
            if e < matrices:
                begin, end = self.bounds(e)
                own = cute.ceil_div(end - begin, self.height)
            before, of_all = block_exclusive_scan(own, self.sums, lane, warp)
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
        """-> (begin, end) of the rows of matrix e. They are within the rows of the result, whatever `ends` contains.
        The last matrix's end is clamped to the number of rows. Any other wrong boundary leaves the matrix without rows,
        and does not affect other matrices."""
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
        """Return the number of the matrix that has work tile `index`. The search starts at matrix e, which must not be
        after the result. One warp calls this."""
        steps = Int32(32)
        while steps == 32:
            # How many of the 32 matrices after e begin at this tile or before it.
            steps = cute.arch.popc(cute.arch.vote_ballot_sync(self.prefix[e + 1 + lane] * self.across <= index))
            e += steps
        return e

    @cute.jit
    def rows_first(self, index, e, lane) -> WorkTileInfo:
        """Return work tile `index`, which must exist, in an order without bands: the tiles of a matrix with the same
        columns are consecutive. The tile's matrix must not come before matrix e."""
        e = self.matrix_of(index, e, lane)
        begin, end = self.bounds(e)
        down = cute.ceil_div(end - begin, self.height)
        local = index - self.prefix[e] * self.across
        return WorkTileInfo(e, begin + local % down * self.height, end, local // down * self.width)

    @cute.jit
    def at(self, index, e, total, lane) -> WorkTileInfo:
        """Return work tile `index` of `total` in the order with bands, or a WorkTileInfo with end = 0 if there is none.
        The tile's matrix must not come before matrix e."""
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
    """GroupedTiles for a single matrix to which all `rows` rows belong: there are no ends to read and no tiles to
    count."""

    rows: Int32
    across: Int32
    height: cutlass.Constexpr[int]
    width: cutlass.Constexpr[int]

    matrices = 1

    @cute.jit
    def clear(self, tid):
        """Do nothing: `count` needs no memory."""

    @cute.jit
    def count(self, threads: cutlass.Constexpr, tid, lane, warp) -> Int32:
        return cute.ceil_div(self.rows, self.height) * self.across

    @cute.jit
    def rows_first(self, index, e, lane) -> WorkTileInfo:
        down = cute.ceil_div(self.rows, self.height)
        return WorkTileInfo(e, index % down * self.height, self.rows, index // down * self.width)

    @cute.jit
    def at(self, index, e, total, lane) -> WorkTileInfo:
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


def tiles_storage(grouped: bool) -> type:
    @cute.struct
    class TilesStorage:
        sums: cute.struct.MemRange[Int32, 32 if grouped else 1]
        prefix: cute.struct.MemRange[Int32, PREFIX_SUMS if grouped else 1]

    return TilesStorage


def tiles_of_matrices(storage, ends: cute.Tensor | None, rows, across, height: int, width: int):
    """Return the tiles of several matrices, or of one if `ends` is None."""
    if ends is None:
        return OneMatrixTiles(rows, across, height, width)
    sums, prefix = (x.get_tensor(cute.make_layout(n)) for x, n in ((storage.sums, 32), (storage.prefix, PREFIX_SUMS)))
    return GroupedTiles(ends, rows, across, sums, prefix, height, width)


@cute.jit
def next_index(index: Int32, step: Int32, tile_counter: cute.Tensor | None, lane) -> Int32:
    """Return the index of this CTA's next tile after tile `index`, in all lanes. `step` is the number of CTAs. Without
    a tile counter the scheduler is static. With one, the CTA takes the first tile that no CTA has taken; CTA i starts
    with tile i. One warp calls this."""
    following = index + step
    if cutlass.const_expr(tile_counter is not None):
        following = step + draw(tile_counter, lane)
    return following


def expected_tiles(rows: int, matrices: int, each: int) -> float:
    """Return the expected number of tiles of `each` rows per matrix, if each of `rows` rows belongs to a random matrix:
    sum over j >= 0 of P(rows of the matrix > j * `each`), with a Poisson distribution."""
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
