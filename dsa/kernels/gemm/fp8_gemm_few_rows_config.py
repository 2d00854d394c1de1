"""Tile configurations of the small-M FP8 product kernels (fp8_gemm_few_rows_sm90.py, and split-K in
fp8_gemm_split_channels_sm90.py), and the cost model that chooses one for a shape.

For one matrix, fp8_gemm_choice.py makes the final choice; there dsa/tuned/sm_90/fp8_gemm_nt.json overrides the model
for measured shapes.
"""

import math
from dataclasses import dataclass

from dsa.cute.sm90 import SHARED_BYTES
from dsa.kernels.gemm.grouped_tiles import expected_tiles
from dsa.kernels.gemm.limits import GROUP

COLUMNS = 64  # M of a wgmma, and the columns of most work tiles
SCALES = 4  # blocks of channels whose scales are loaded together: 16 bytes, the minimum of TMA
CONSUMER_WARPS = 4
SPLIT_SPAN = 2  # blocks of channels per stage in split-K clusters
SM_BYTES = 233472  # shared memory of an SM; a CTA occupies 1 KiB more than it requests
# Upper limit on the blocks of channels with split-K: the products of all blocks must fit in shared memory.
MAX_SPLIT_BLOCKS = 64


@dataclass(frozen=True)
class FewRowsConfig:
    """A work tile and its pipeline.

    rows     rows of a work tile: 8, 16, 32 or 64
    stages   stages of the ring
    ctas     CTAs of the cluster that splits the channels of a work tile: 1 (no split-K), 2, 4 or 8
    columns  columns of a work tile: 32 or 64; with split-K always 64
    """

    rows: int
    stages: int
    ctas: int = 1
    columns: int = COLUMNS

    @property
    def span(self) -> int:
        """Number of blocks of 128 channels per stage."""
        return SCALES if self.ctas == 1 else SPLIT_SPAN

    def shared_bytes(self) -> int:
        """Return the bytes of shared memory of a CTA, including room for alignment."""
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
        return self.shared_bytes() <= SHARED_BYTES


WHOLE_CONFIGS = (
    *(FewRowsConfig(8, 6), FewRowsConfig(16, 5), FewRowsConfig(32, 4), FewRowsConfig(64, 3)),
    FewRowsConfig(8, 6, columns=32),
)
# Split-K. With 8 or 16 rows, two CTAs share an SM. Otherwise clusters would leave SMs idle, because a cluster must fit
# into one GPC.
SPLIT_CONFIGS = (
    *(FewRowsConfig(8, 4, 4), FewRowsConfig(8, 5, 8)),
    *(FewRowsConfig(16, 3, 8), FewRowsConfig(32, 5, 8)),
)
CONFIGS = WHOLE_CONFIGS + SPLIT_CONFIGS
GROUPED_CONFIGS = WHOLE_CONFIGS[:3]  # for products with several matrices
# The cost model, measured on an H200. BLOCK: microseconds per block of channels, plus ROW per row of the tile.
# TILE_END: microseconds at a work tile's end. Bytes per microsecond: MEMORY_RATE from memory, SM_RATE to one SM,
# SEND_RATE of partial products to one CTA. BARRIERS: microseconds of the cluster barriers.
BLOCK, ROW, TILE_END = 0.04, 0.0017, 0.6
MEMORY_RATE, SM_RATE, SEND_RATE, BARRIERS = 4.8e6, 145e3, 45e3, 0.2
ROOM = 0.8  # fraction of the resident CTAs that clusters can use, since a cluster must fit into one GPC


def choose_config(rows: int, columns: int, channels: int, multiprocessors: int) -> FewRowsConfig:
    """Return the configuration with the shortest modelled time, among those that `can_run` accepts."""
    sizes = rows, columns, channels, multiprocessors
    # For more than 8 rows, 8-row tiles of 64 columns never win: each takes as long as a 16-row tile. Those of 32
    # columns can win, because they load less.
    configs = [config for config in CONFIGS if rows <= 8 or config.rows > 8 or config.columns < COLUMNS]
    return min((c for c in configs if can_run(c, *sizes)), key=lambda config: microseconds(config, *sizes))


def can_run(config: FewRowsConfig, rows: int, columns: int, channels: int, multiprocessors: int) -> bool:
    """Whether this tile can be chosen. Taller tiles than the smallest one with room for `rows` rows cannot. With
    split-K, shared memory must have room for all blocks, and all clusters must be resident at once."""
    heights = sorted({config.rows for config in CONFIGS})
    if config.rows > min((height for height in heights if rows <= height), default=heights[-1]):
        return False
    if config.ctas == 1:
        return True
    ctas = work_tiles(config, rows, columns) * config.ctas
    blocks = -(-channels // (SCALES * GROUP)) * SCALES
    return blocks <= MAX_SPLIT_BLOCKS and ctas <= ROOM * multiprocessors * config.ctas_per_sm()


def choose_grouped_config(rows: int, matrices: int) -> FewRowsConfig:
    """Return the configuration that is expected to load the fewest bytes. Each of the `rows` rows is multiplied by one
    of the `matrices` matrices."""
    return min(
        GROUPED_CONFIGS,
        key=lambda config: expected_tiles(rows, matrices, config.rows) * (config.columns + config.rows),
    )


def work_tiles(config: FewRowsConfig, rows: int, columns: int) -> int:
    return -(-columns // config.columns) * -(-rows // config.rows)


def microseconds(config: FewRowsConfig, rows: int, columns: int, channels: int, multiprocessors: int) -> float:
    """Return the modelled time without the launch. CTAs run in whole rounds. A round is one CTA per SM; with split-K,
    only a fraction ROOM of the SMs is used. A block of channels takes the time of the mainloop or of the SM's loads,
    whichever is longer. Memory delivers all operands once. The times of an SM and of memory overlap in part, so the
    result is the root of the sum of squares."""
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
    memory = (columns * channels + rows * (channels + 2 * columns)) / MEMORY_RATE
    return math.hypot(rounds * busy, memory) + rounds * exchange
