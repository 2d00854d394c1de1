"""Tile configurations of the FP8 product kernel, and which of them a shape gets."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dsa.cute.sm90 import SHARED_BYTES, WARPGROUP
from dsa.kernels.gemm.grouped_tiles import PREFIX_SUMS
from dsa.kernels.gemm.limits import GROUP

SCALES = 4  # blocks of channels whose scales are loaded at a time
WARP_ROWS = 16
# A warp's results on their way out: chunks of 16 rows of 128 bytes, which are so many columns of 16 bits.
CHUNK, CHUNK_BYTES = 64, WARP_ROWS * 128


@dataclass(frozen=True)
class Fp8GemmConfig:
    """groups: consumer warpgroups; waves: so many times 64 rows has each of them, one after the other; columns: of a
    work tile; stages: blocks of 128 channels in flight; chunks: of results that a warp has shared memory for."""

    groups: int
    waves: int
    columns: int
    stages: int
    chunks: int

    @property
    def rows(self) -> int:
        return 64 * self.groups * self.waves

    @property
    def has_room(self) -> bool:
        """Whether a warp has shared memory for all of its 16-bit results, in whole chunks, which TMA stores then."""
        return self.chunks * CHUNK >= self.columns * self.waves and self.columns % CHUNK == 0

    @property
    def piece(self) -> int:
        """Columns from a multiple of as many on: they share a scale, wherever the work tile begins."""
        return math.gcd(self.columns, CHUNK)

    @property
    def together(self) -> int:
        """Blocks of channels multiplied before the first of them is added: what hides a narrow tile's latency."""
        return max(1, 128 // self.columns) if self.waves == 1 else 1

    @property
    def threads(self) -> int:
        return (self.groups + 1) * WARPGROUP

    @property
    def scale_slots(self) -> int:
        """A group of SCALES blocks is read before the first of them is released."""
        return -(-self.stages // SCALES)

    def fits(self) -> bool:
        """Whether shared memory holds it."""
        loaded = self.stages * (self.rows + self.columns) * GROUP
        scales = self.scale_slots * (self.rows * SCALES * 4 + 256)
        staged = 4 * self.groups * self.chunks * CHUNK_BYTES
        return loaded + scales + staged + 4 * (PREFIX_SUMS + 32) + 16 * self.stages + 256 + 4 * 1024 <= SHARED_BYTES


Config = TypeVar("Config", bound=Fp8GemmConfig)
TileClocks = Callable[[Config, int, int], float]

CONFIGS = (
    Fp8GemmConfig(1, 1, 64, 11, 1),
    Fp8GemmConfig(1, 1, 128, 8, 1),
    Fp8GemmConfig(2, 1, 64, 7, 1),
    Fp8GemmConfig(2, 1, 128, 5, 2),
    Fp8GemmConfig(2, 1, 192, 4, 3),
    Fp8GemmConfig(2, 2, 128, 4, 1),
)
# For one matrix. Widths between those of the others fill multiprocessors that these leave idle.
ONE_MATRIX_CONFIGS = (
    Fp8GemmConfig(1, 1, 48, 13, 1),
    CONFIGS[0],
    Fp8GemmConfig(1, 1, 96, 9, 2),
    Fp8GemmConfig(1, 1, 128, 8, 2),
    Fp8GemmConfig(1, 1, 192, 5, 3),
    CONFIGS[2],
    Fp8GemmConfig(2, 1, 96, 6, 2),
    *CONFIGS[3:],
)
# With SwiGLU the columns are those of gate and of up, half of each.
SWIGLU_CONFIGS = (Fp8GemmConfig(1, 1, 256, 5, 1), Fp8GemmConfig(2, 1, 256, 4, 1))
# What warps gather rows for: these have registers for as many.
GATHERING_CONFIGS = (CONFIGS[1], CONFIGS[3])
# With at most this many rows in the result the kernel gathers the rows of a itself, which costs a quarter of its time
# when the tensor cores are busy. Rows of larger results are copied before the launch.
GATHERED_ROWS = 4096
# Of these work tiles can be drawn.
DRAWN_CONFIGS = CONFIGS[3:]
# Of these, those whose work tiles of few rows are turned (turned_tile.py), as those of SwiGLU are.
TURNED_CONFIGS = (CONFIGS[3], CONFIGS[5])
TURNED_COUNTS = (16, 32)  # rows of a that a turned wgmma multiplies, as its columns
TURNED_ROWS = TURNED_COUNTS[-1]  # of a turned work tile, at most
# Clocks of a work tile beside its blocks of channels, where TMA stores its results and where warps do; of a block
# beside its products. Measured on an H200.
TMA_STORE_CLOCKS, STORE_CLOCKS, BLOCK_CLOCKS = 2100, 4400, 150
TURNED_CLOCKS = 300  # of a block of a turned work tile at least
# One matrix' products of up to MODEL_ROWS rows have a model of their own, measured on an H200, whose blocks take no
# BLOCK_CLOCKS. Clocks a microsecond; bytes a microsecond from memory, and by what part these take longer for each part
# of the multiprocessors that loads nothing. Microseconds of a work tile's end, and results that TMA and that warps
# store in one; microseconds more of a block whose part of b no other work tile reads, and of a block that one of two
# warpgroups multiplies alone.
MODEL_ROWS = 1024
CLOCKS, MEMORY_RATE, IDLE = 1980.0, 3.9e6, 0.185
TILE_END, TMA_STORE_RATE, STORE_RATE, UNSHARED, ALONE = 0.15, 33e3, 26e3, 0.039, 0.55


def choose_config(
    rows: int,
    columns: int,
    channels: int,
    matrices: int,
    multiprocessors: int,
    configs: tuple[Fp8GemmConfig, ...] = CONFIGS,
) -> Fp8GemmConfig:
    """For `rows` in all: what takes the fewest clocks. One warpgroup has to do for matrices of up to 64 rows."""
    few = rows <= 64 * max(min(rows, matrices), 1)
    narrow = [config for config in configs if config.groups == 1] if few else []
    return of_fewest_clocks(narrow or configs, tile_clocks, rows, columns, channels, matrices, multiprocessors)


def choose_drawn_config(rows: int, columns: int, channels: int, matrices: int, multiprocessors: int) -> Fp8GemmConfig:
    """The same of work tiles that are drawn."""
    return of_fewest_clocks(DRAWN_CONFIGS, drawn_tile_clocks, rows, columns, channels, matrices, multiprocessors)


def choose_one_config(rows: int, columns: int, channels: int, multiprocessors: int) -> Fp8GemmConfig:
    """For one matrix: what takes the shortest time."""
    if rows > MODEL_ROWS:
        return of_fewest_clocks(ONE_MATRIX_CONFIGS, tile_clocks, rows, columns, channels, 1, multiprocessors)
    return min(
        ONE_MATRIX_CONFIGS, key=lambda config: microseconds_of_one(config, rows, columns, channels, multiprocessors)
    )


def microseconds_of_one(config: Fp8GemmConfig, rows: int, columns: int, channels: int, multiprocessors: int) -> float:
    """Of one matrix' product, without the launch: the rounds of work tiles that a multiprocessor computes, or what
    memory takes, which the fourth powers let pass for each other where they are about as long."""
    blocks, down = -(-channels // GROUP), -(-rows // config.rows)
    tiles = down * -(-columns // config.columns)
    rounds = -(-tiles // multiprocessors)
    high = min(rows, config.rows)
    block = tile_block_clocks(config, high) / CLOCKS + (UNSHARED if down == 1 else 0)
    if config.groups == 2 and 0 < rows % config.rows <= 64:
        # The last tiles of rows have a warpgroup without any: they take their share of the rounds, or all of a single
        # one.
        block += max(ALONE - block, 0) / min(down, rounds)
    stored = high * config.columns / (TMA_STORE_RATE if config.has_room else STORE_RATE)
    busy = rounds * (TILE_END + stored + blocks * block)
    idle = 1 - tiles / (rounds * multiprocessors)
    memory = (columns * channels + rows * (channels + 2 * columns)) / MEMORY_RATE * (1 + IDLE * idle)
    return (busy**4 + memory**4) ** (1 / 4)


def of_fewest_clocks(
    configs: Sequence[Config],
    tile_clocks: TileClocks[Config],
    rows: int,
    columns: int,
    channels: int,
    matrices: int,
    multiprocessors: int,
) -> Config:
    """One of `configs`, where a work tile of so many rows and blocks takes tile_clocks(config, rows, blocks). One
    matrix's tiles are dealt out in whole rounds; those of several even out, and their rows are taken for random numbers
    about the mean."""
    blocks = -(-channels // GROUP)
    used = max(min(rows, matrices), 1)
    each = rows / used
    sizes = [max(1, round(each + sign * each**0.5)) for sign in (-1, 1)]

    def clocks(config: Config) -> float:
        if matrices == 1:
            return _clocks_of_one(tile_clocks, config, rows, columns, blocks, multiprocessors)
        across = -(-columns // config.columns)
        total = sum(across * _clocks_of_column(tile_clocks, config, size, blocks) for size in sizes)
        return total * used / len(sizes) / multiprocessors

    return min(configs, key=clocks)


def _clocks_of_one(
    tile_clocks: TileClocks[Config], config: Config, rows: int, columns: int, blocks: int, multiprocessors: int
) -> float:
    """Of one matrix' product."""
    across = -(-columns // config.columns)
    rounds = -(-across * -(-rows // config.rows) // multiprocessors)
    longest = rounds * tile_clocks(config, min(rows, config.rows), blocks)
    return max(across * _clocks_of_column(tile_clocks, config, rows, blocks) / multiprocessors, longest)


def _clocks_of_column(tile_clocks: TileClocks[Config], config: Config, rows: int, blocks: int) -> float:
    """Of the tiles that have the same columns, one after the other."""
    full, left = divmod(rows, config.rows)
    return full * tile_clocks(config, config.rows, blocks) + (tile_clocks(config, left, blocks) if left else 0)


def drawn_tile_clocks(config: Fp8GemmConfig, rows: int, blocks: int) -> float:
    """Of a work tile that is drawn, and that is turned if it has few rows: of these the time is what shared memory
    takes, or a warpgroup's waiting."""
    if rows > TURNED_ROWS or config not in TURNED_CONFIGS:
        return tile_clocks(config, rows, blocks)
    moved = config.groups * (64 + rows) + 64 + config.columns
    return STORE_CLOCKS + blocks * (BLOCK_CLOCKS + max(moved, TURNED_CLOCKS))


def tile_clocks(config: Fp8GemmConfig, rows: int, blocks: int) -> float:
    """Of a work tile with so many rows."""
    stored = TMA_STORE_CLOCKS if config.waves == 1 else STORE_CLOCKS
    return stored + blocks * (BLOCK_CLOCKS + tile_block_clocks(config, rows))


def tile_block_clocks(config: Fp8GemmConfig, rows: int) -> int:
    """Of a block of 128 channels: what the tensor cores and the multiply-adds take, which keep each other from the
    registers; or shared memory, which moves 128 bytes a clock: what TMA writes, and what every wgmma reads, its 64 rows
    and its columns. A warpgroup alone waits for each product of its own."""
    units = -(-rows // 64)
    multiplied = units * config.columns * 2 + units * config.columns // 2
    moved = units * (64 + config.columns) + config.rows + config.columns
    alone = -(-units // config.groups) * (config.columns * 5 // 2 + 180 // config.together)
    return max(multiplied, moved, alone)
