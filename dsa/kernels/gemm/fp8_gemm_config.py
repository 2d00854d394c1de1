"""Tile configurations of the FP8 product kernel (fp8_gemm_sm90.py), and the cost models that choose one for a shape.

For one matrix, fp8_gemm_choice.py makes the final choice; there dsa/tuned/sm_90/fp8_gemm_nt.json overrides the models
for measured shapes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dsa.cute.sm90 import SHARED_BYTES, WARPGROUP
from dsa.kernels.gemm.grouped_tiles import PREFIX_SUMS
from dsa.kernels.gemm.limits import GROUP

SCALES = 4  # blocks of channels whose scales are loaded at a time
WARP_ROWS = 16
# A chunk of a warp's 16-bit results in shared memory: 16 rows of 128 bytes, which are 64 columns.
CHUNK, CHUNK_BYTES = 64, WARP_ROWS * 128


@dataclass(frozen=True)
class Fp8GemmConfig:
    """A work tile and its pipeline.

    groups   consumer warpgroups
    waves    number of waves: a warpgroup multiplies 64 rows per wave, one wave after the other
    columns  columns of a work tile
    stages   stages of the ring, each a block of 128 channels
    chunks   how many chunks a warp has shared memory for; a chunk is 16 rows x 64 columns of 16-bit results
    """

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
        """Whether TMA stores 16-bit results. A warp then has shared memory for all its results of a work tile, and the
        tile's columns are whole chunks."""
        return self.chunks * CHUNK >= self.columns * self.waves and self.columns % CHUNK == 0

    @property
    def piece(self) -> int:
        """Columns of a piece, which has one scale of b. Pieces start at multiples of their width, which divides 64. So
        no piece straddles two scale blocks of 128 columns."""
        return math.gcd(self.columns, CHUNK)

    @property
    def together(self) -> int:
        """Blocks of channels whose wgmma are issued before the first block's products are added to the sums. More than
        one hides the latency of a narrow tile's wgmma."""
        return max(1, 128 // self.columns) if self.waves == 1 else 1

    @property
    def threads(self) -> int:
        return (self.groups + 1) * WARPGROUP

    @property
    def scale_slots(self) -> int:
        """A slot has the scales of SCALES blocks. Consumers read it before they release the first of these blocks, so
        one slot per SCALES stages is enough."""
        return -(-self.stages // SCALES)

    def fits(self) -> bool:
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
# Configurations for one matrix. More widths than in CONFIGS: each gives another number of work tiles, so one can occupy
# SMs that the others leave idle.
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
# Configurations for SwiGLU. Half of the columns belong to gate and half to up.
SWIGLU_CONFIGS = (Fp8GemmConfig(1, 1, 256, 5, 1), Fp8GemmConfig(2, 1, 256, 4, 1))
# Configurations for kernels that gather the rows of `a`, without SwiGLU. Their producer threads have registers for the
# rows' indices.
GATHERING_CONFIGS = (CONFIGS[1], CONFIGS[3])
# Up to this many expected rows of the result, the kernel itself gathers the rows of `a`. For more rows the op copies
# them before the launch: gathering makes a kernel that is bound by the tensor cores 20 to 25% slower.
GATHERED_ROWS = 4096
# Configurations for a dynamic scheduler, without SwiGLU.
DYNAMIC_CONFIGS = CONFIGS[3:]
# With a dynamic scheduler, these configurations and the last of SWIGLU_CONFIGS swap A/B for work tiles with up to
# SWAP_AB_ROWS rows (swap_ab_tile.py).
SWAP_AB_CONFIGS = (CONFIGS[3], CONFIGS[5])
SWAP_AB_COUNTS = (16, 32)  # with swapped operands: rows of `a` per wgmma (its N)
SWAP_AB_ROWS = SWAP_AB_COUNTS[-1]  # upper limit on the rows of a work tile with swapped operands
# The cost model in cycles, measured on an H200. TMA_STORE_CLOCKS, STORE_CLOCKS: overhead of a work tile if TMA stores
# its results, and if warps store them. BLOCK_CLOCKS: overhead of a block of channels.
TMA_STORE_CLOCKS, STORE_CLOCKS, BLOCK_CLOCKS = 2100, 4400, 150
# Lower limit on the cycles of a block in a work tile with swapped operands, without BLOCK_CLOCKS.
SWAP_AB_CLOCKS = 300
# The cost model in microseconds (`microseconds_of_one`), measured on an H200. It uses none of the overheads above. It
# chooses the configuration for one matrix and up to MODEL_ROWS rows. CLOCKS: cycles per microsecond. MEMORY_RATE: bytes
# per microsecond from memory. IDLE: relative slowdown of memory per fraction of idle SMs. TILE_END: microseconds at the
# end of a work tile, without the stores. TMA_STORE_RATE, STORE_RATE: results of one work tile per microsecond if TMA
# stores them, and if warps store them. UNSHARED: additional microseconds of a block if no other work tile reads the
# same part of b. ALONE: lower limit on the microseconds of a block that only one of two warpgroups multiplies.
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
    """Return the configuration with the fewest modelled cycles for `rows` rows of all matrices together. For at most 64
    rows per matrix, configurations with one consumer warpgroup are preferred."""
    few = rows <= 64 * max(min(rows, matrices), 1)
    narrow = [config for config in configs if config.groups == 1] if few else []
    return of_fewest_clocks(narrow or configs, tile_clocks, rows, columns, channels, matrices, multiprocessors)


def choose_dynamic_config(rows: int, columns: int, channels: int, matrices: int, multiprocessors: int) -> Fp8GemmConfig:
    return of_fewest_clocks(DYNAMIC_CONFIGS, dynamic_tile_clocks, rows, columns, channels, matrices, multiprocessors)


def choose_one_config(rows: int, columns: int, channels: int, multiprocessors: int) -> Fp8GemmConfig:
    if rows > MODEL_ROWS:
        return of_fewest_clocks(ONE_MATRIX_CONFIGS, tile_clocks, rows, columns, channels, 1, multiprocessors)
    return min(
        ONE_MATRIX_CONFIGS, key=lambda config: microseconds_of_one(config, rows, columns, channels, multiprocessors)
    )


def microseconds_of_one(config: Fp8GemmConfig, rows: int, columns: int, channels: int, multiprocessors: int) -> float:
    """Return the modelled time of a product with one matrix, without the launch. It is about the longer of two times,
    with a smooth transition: the busiest SM's work tiles, and memory traffic."""
    blocks, down = -(-channels // GROUP), -(-rows // config.rows)
    tiles = down * -(-columns // config.columns)
    rounds = -(-tiles // multiprocessors)
    high = min(rows, config.rows)
    block = tile_block_clocks(config, high, config.columns) / CLOCKS + (UNSHARED if down == 1 else 0)
    if config.groups == 2 and 0 < rows % config.rows <= 64:
        # In the last row of tiles, one of the two warpgroups has no rows. One of `down` tiles is in it, and at least
        # one of the busiest SM's `rounds` tiles.
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
    """Return the configuration with the fewest modelled cycles. tile_clocks(config, rows, blocks) models a work tile.
    With one matrix, SMs compute work tiles in whole rounds, one tile per SM. With several matrices, the work is spread
    evenly over the SMs. Routing spreads rows at random, so the model assumes mean - sqrt(mean) rows for half of the
    matrices that have rows, and mean + sqrt(mean) rows for the other half."""
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
    """Return the modelled cycles of a product with one matrix: work / SMs, or whole rounds of the longest work tile if
    they take longer."""
    across = -(-columns // config.columns)
    rounds = -(-across * -(-rows // config.rows) // multiprocessors)
    longest = rounds * tile_clocks(config, min(rows, config.rows), blocks)
    return max(across * _clocks_of_column(tile_clocks, config, rows, blocks) / multiprocessors, longest)


def _clocks_of_column(tile_clocks: TileClocks[Config], config: Config, rows: int, blocks: int) -> float:
    """Return the modelled cycles of all work tiles with the same columns, one after the other, in a matrix with `rows`
    rows."""
    full, left = divmod(rows, config.rows)
    return full * tile_clocks(config, config.rows, blocks) + (tile_clocks(config, left, blocks) if left else 0)


def dynamic_tile_clocks(config: Fp8GemmConfig, rows: int, blocks: int) -> float:
    """`tile_clocks` for a dynamic scheduler, which swaps A/B in small tiles. Such a tile is bound by shared memory or
    by the latency of a warpgroup (SWAP_AB_CLOCKS)."""
    if rows > SWAP_AB_ROWS or config not in SWAP_AB_CONFIGS:
        return tile_clocks(config, rows, blocks)
    moved = config.groups * (64 + rows) + 64 + config.columns
    return STORE_CLOCKS + blocks * (BLOCK_CLOCKS + max(moved, SWAP_AB_CLOCKS))


def tile_clocks(config: Fp8GemmConfig, rows: int, blocks: int) -> float:
    stored = TMA_STORE_CLOCKS if config.waves == 1 else STORE_CLOCKS
    return stored + blocks * (BLOCK_CLOCKS + tile_block_clocks(config, rows, config.columns))


def tile_block_clocks(config: Fp8GemmConfig, rows: int, b_moves: int, latency: int = 180) -> int:
    """Return the modelled cycles of a block of 128 channels, without overhead: the longest of three times.

    multiplied  tensor cores plus multiply-adds, which compete for the registers
    moved       shared memory, 128 bytes per cycle: each wgmma reads 64 rows of `a` and all columns of `b`. Before that,
                `a` and `b` are written; writing `b` takes `b_moves` cycles
    alone       one warpgroup multiplies, and waits `latency` cycles per `config.together` blocks
    """
    units = -(-rows // 64)
    multiplied = units * config.columns * 2 + units * config.columns // 2
    moved = units * (64 + config.columns) + config.rows + b_moves
    alone = -(-units // config.groups) * (config.columns * 5 // 2 + latency // config.together)
    return max(multiplied, moved, alone)
