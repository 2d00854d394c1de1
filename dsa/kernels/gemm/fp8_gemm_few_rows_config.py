"""Tile configurations of the FP8 product kernels of few rows, and which of them a shape gets."""

import math
from dataclasses import dataclass

from dsa.cute.sm90 import SHARED_BYTES
from dsa.kernels.gemm.grouped_tiles import expected_tiles
from dsa.kernels.gemm.limits import GROUP

COLUMNS = 64  # the rows of a wgmma: columns of most work tiles
SCALES = 4  # blocks whose scales are loaded together: 16 bytes, which is the least that TMA loads
CONSUMER_WARPS = 4
SPLIT_SPAN = 2  # blocks of a stage where a cluster splits the channels
SM_BYTES = 233472  # of shared memory of an SM; a CTA takes 1 KiB more than it asks for
MAX_SPLIT_BLOCKS = 64  # that a cluster splits: what its shared memory has room for


@dataclass(frozen=True)
class FewRowsConfig:
    """rows: of a work tile, 8, 16, 32 or 64; stages: of the ring; ctas: that split the channels of a work tile between
    them, 1, 2, 4 or 8; columns: of a work tile, 32 or 64."""

    rows: int
    stages: int
    ctas: int = 1
    columns: int = COLUMNS

    @property
    def span(self) -> int:
        """Blocks of 128 channels of a stage."""
        return SCALES if self.ctas == 1 else SPLIT_SPAN

    def shared_bytes(self) -> int:
        """What a CTA takes, with room for alignment."""
        ring = self.stages * (self.span * (COLUMNS + self.rows) * GROUP + 16)
        if self.ctas == 1:
            scales, results = self.stages * SCALES * 4 * (self.rows + 1), CONSUMER_WARPS * self.rows * 32
        else:
            scales = (self.rows + 1) * (MAX_SPLIT_BLOCKS + 4) * 4
            results = MAX_SPLIT_BLOCKS * COLUMNS * self.rows * 4 // self.ctas
        return ring + scales + results + 2 * 1024

    def ctas_per_sm(self) -> int:
        return SM_BYTES // (self.shared_bytes() + 1024)

    def fits(self) -> bool:
        """Whether shared memory holds it."""
        return self.shared_bytes() <= SHARED_BYTES


WHOLE_CONFIGS = (
    *(FewRowsConfig(8, 6), FewRowsConfig(16, 5), FewRowsConfig(32, 4), FewRowsConfig(64, 3)),
    FewRowsConfig(8, 6, columns=32),
)
# Those of 8 and 16 rows take up to 113 KiB, which lets two CTAs share an SM: clusters do not fill the SMs otherwise.
SPLIT_CONFIGS = (
    *(FewRowsConfig(8, 4, 4), FewRowsConfig(8, 5, 8)),
    *(FewRowsConfig(16, 3, 8), FewRowsConfig(32, 5, 8)),
)
CONFIGS = WHOLE_CONFIGS + SPLIT_CONFIGS
GROUPED_CONFIGS = WHOLE_CONFIGS[:3]  # for several matrices
# The cost model, measured on an H200. Microseconds of a block of channels, of each of its rows, and of a work tile's
# end; bytes a microsecond from memory, to one SM, and of products to one CTA; microseconds of an exchange's barriers.
BLOCK, ROW, TILE_END = 0.04, 0.0017, 0.6
MEMORY_RATE, SM_RATE, SEND_RATE, BARRIERS = 4.8e6, 145e3, 45e3, 0.2
ROOM = 0.8  # of the CTAs that multiprocessors have room for, those in clusters: what fits into groups of SMs at once


def choose_config(rows: int, columns: int, channels: int, multiprocessors: int) -> FewRowsConfig:
    """What takes the shortest time, of tiles no higher than the rows need, and of clusters that can run all at once."""
    sizes = rows, columns, channels, multiprocessors
    # Tiles of 8 rows take as long as those of 16, which are half as many. Those of 32 columns load less.
    configs = [config for config in CONFIGS if rows <= 8 or config.rows > 8 or config.columns < COLUMNS]
    return min((c for c in configs if can_run(c, *sizes)), key=lambda config: microseconds(config, *sizes))


def can_run(config: FewRowsConfig, rows: int, columns: int, channels: int, multiprocessors: int) -> bool:
    """Whether its tiles are no higher than the rows need, and clusters have room for all blocks and run all at once."""
    heights = sorted({config.rows for config in CONFIGS})
    if config.rows > min((height for height in heights if rows <= height), default=heights[-1]):
        return False
    if config.ctas == 1:
        return True
    # A cluster has to fit into a group of SMs, and groups have different numbers of them.
    ctas = work_tiles(config, rows, columns) * config.ctas
    blocks = -(-channels // (SCALES * GROUP)) * SCALES
    return blocks <= MAX_SPLIT_BLOCKS and ctas <= ROOM * multiprocessors * config.ctas_per_sm()


def choose_grouped_config(rows: int, matrices: int) -> FewRowsConfig:
    """For `rows` of several matrices in all: what loads the fewest bytes."""
    return min(
        GROUPED_CONFIGS,
        key=lambda config: expected_tiles(rows, matrices, config.rows) * (config.columns + config.rows),
    )


def work_tiles(config: FewRowsConfig, rows: int, columns: int) -> int:
    return -(-columns // config.columns) * -(-rows // config.rows)


def microseconds(config: FewRowsConfig, rows: int, columns: int, channels: int, multiprocessors: int) -> float:
    """What an SM takes for its work tiles, in whole rounds: their blocks, for each the mainloop's time or that of its
    bytes, and their ends; while memory reads everything once. The two hide each other as a rule, but not where either
    waits for the other. Then the exchange of products, if there is one. Without the launch."""
    blocks = -(-channels // (SCALES * GROUP)) * SCALES
    ctas = work_tiles(config, rows, columns) * config.ctas
    rounds = math.ceil(ctas / (multiprocessors * (ROOM if config.ctas > 1 else 1)))
    of_cta = -(-blocks // (config.span * config.ctas)) * config.span
    loaded = (config.columns + min(config.rows, rows)) * GROUP
    busy = of_cta * max(BLOCK + ROW * config.rows, loaded / SM_RATE)
    exchange = 0.0
    if config.ctas == 1:
        busy += TILE_END
    else:
        exchange = BARRIERS + blocks * COLUMNS * config.rows * 4 / config.ctas / SEND_RATE
    return math.hypot(rounds * busy, memory(rows, columns, channels)) + rounds * exchange


def memory(rows: int, columns: int, channels: int) -> float:
    """Microseconds in which memory reads the operands and takes the results."""
    return (columns * channels + rows * (channels + 2 * columns)) / MEMORY_RATE
