"""Tile configurations of the large-M product with FP4 weights, and the choice of one for a shape."""

from dataclasses import dataclass

from dsa.cute.sm90 import SHARED_BYTES, WARPGROUP
from dsa.kernels.gemm.fp4_operand import TABLE_BYTES
from dsa.kernels.gemm.fp8_gemm_config import (
    CHUNK_BYTES,
    SCALES,
    STORE_CLOCKS,
    TMA_STORE_CLOCKS,
    Fp8GemmConfig,
    of_fewest_clocks,
)
from dsa.kernels.gemm.grouped_tiles import PREFIX_SUMS
from dsa.kernels.gemm.limits import GROUP


@dataclass(frozen=True)
class Fp8Fp4GemmConfig(Fp8GemmConfig):
    """The fields are those of the FP8 product; `columns` is 128."""

    @property
    def threads(self) -> int:
        """The threads of the consumers, the converters and the producer."""
        return (self.groups + 2) * WARPGROUP

    def fits(self) -> bool:
        """Whether the configuration fits into shared memory."""
        loaded = self.stages * (self.rows + self.columns) * GROUP
        scales = self.scale_slots * ((self.rows + self.columns) * SCALES * 4 + 256)
        staged = 4 * self.groups * self.chunks * CHUNK_BYTES
        others = 4 * (PREFIX_SUMS + 32) + TABLE_BYTES + 24 * self.stages + 256 + 2 * 1024
        return loaded + scales + staged + others <= SHARED_BYTES


CONFIGS = (Fp8Fp4GemmConfig(1, 1, 128, 8, 2), Fp8Fp4GemmConfig(2, 1, 128, 5, 2), Fp8Fp4GemmConfig(2, 2, 128, 4, 1))
# The cost model. BLOCK_CLOCKS: overhead of a block, in cycles. WIDEN_CLOCKS: cycles to widen 128 columns of a block.
# WIDEN_MOVES: cycles in which shared memory moves the codes, tables and e4m3 numbers of a block.
BLOCK_CLOCKS, WIDEN_CLOCKS, WIDEN_MOVES = 120, 450, 224


def choose_config(rows: int, columns: int, channels: int, matrices: int, multiprocessors: int) -> Fp8Fp4GemmConfig:
    """The configuration with the fewest modelled cycles for `rows` rows of all matrices together."""
    return of_fewest_clocks(CONFIGS, tile_clocks, rows, columns, channels, matrices, multiprocessors)


def tile_clocks(config: Fp8Fp4GemmConfig, rows: int, blocks: int) -> float:
    """Modelled cycles of a work tile with `rows` rows. The slowest of these determines the time of a block, as in the
    FP8 product: the tensor cores with the multiply-adds, shared memory, the latency of one warpgroup, or the
    converters."""
    units = -(-rows // 64)
    multiplied = units * config.columns * 2 + units * config.columns // 2
    moved = units * (64 + config.columns) + config.rows + config.columns // 2 + WIDEN_MOVES
    alone = -(-units // config.groups) * (config.columns * 5 // 2 + 100 // config.together)
    stored = TMA_STORE_CLOCKS if config.waves == 1 else STORE_CLOCKS
    return stored + blocks * (BLOCK_CLOCKS + max(multiplied, moved, alone, WIDEN_CLOCKS))
