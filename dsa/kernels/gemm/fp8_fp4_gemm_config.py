"""Tile configurations of the product with FP4 weights for many rows, and which of them a shape gets."""

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
    """As the FP8 product's, of 128 columns."""

    @property
    def threads(self) -> int:
        """Those of the consumers, of the converters and of the producer."""
        return (self.groups + 2) * WARPGROUP

    def fits(self) -> bool:
        """Whether shared memory holds it."""
        loaded = self.stages * (self.rows + self.columns) * GROUP
        scales = self.scale_slots * ((self.rows + self.columns) * SCALES * 4 + 256)
        staged = 4 * self.groups * self.chunks * CHUNK_BYTES
        others = 4 * (PREFIX_SUMS + 32) + TABLE_BYTES + 24 * self.stages + 256 + 2 * 1024
        return loaded + scales + staged + others <= SHARED_BYTES


CONFIGS = (Fp8Fp4GemmConfig(1, 1, 128, 8, 2), Fp8Fp4GemmConfig(2, 1, 128, 5, 2), Fp8Fp4GemmConfig(2, 2, 128, 4, 1))
# Clocks of a block beside its products; of 128 columns that are widened, and those of them in which shared memory moves
# codes, tables and e4m3 numbers.
BLOCK_CLOCKS, WIDEN_CLOCKS, WIDEN_MOVES = 120, 450, 224


def choose_config(rows: int, columns: int, channels: int, matrices: int, multiprocessors: int) -> Fp8Fp4GemmConfig:
    """For `rows` in all: what takes the fewest clocks."""
    return of_fewest_clocks(CONFIGS, tile_clocks, rows, columns, channels, matrices, multiprocessors)


def tile_clocks(config: Fp8Fp4GemmConfig, rows: int, blocks: int) -> float:
    """Of a work tile with so many rows, as the FP8 product's: the tensor cores and the multiply-adds, or shared memory,
    or a warpgroup alone; or the converters."""
    units = -(-rows // 64)
    multiplied = units * config.columns * 2 + units * config.columns // 2
    moved = units * (64 + config.columns) + config.rows + config.columns // 2 + WIDEN_MOVES
    alone = -(-units // config.groups) * (config.columns * 5 // 2 + 100 // config.together)
    stored = TMA_STORE_CLOCKS if config.waves == 1 else STORE_CLOCKS
    return stored + blocks * (BLOCK_CLOCKS + max(multiplied, moved, alone, WIDEN_CLOCKS))
