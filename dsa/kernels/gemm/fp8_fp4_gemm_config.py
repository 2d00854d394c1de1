"""Tile configurations of the product with FP4 weights for many rows, and which of them a shape gets."""

from dataclasses import dataclass

from dsa.cute.sm90 import SHARED_BYTES, WARPGROUP
from dsa.kernels.gemm.fp4_operand import TABLE_BYTES
from dsa.kernels.gemm.fp8_gemm_config import CHUNK_BYTES, SCALES, STORE_CLOCKS, TMA_STORE_CLOCKS, Fp8GemmConfig
from dsa.kernels.gemm.grouped_tiles import PREFIX_SUMS
from dsa.kernels.gemm.limits import GROUP


@dataclass(frozen=True)
class Fp8Fp4GemmConfig(Fp8GemmConfig):
    """As the FP8 product's, of parts of 128 columns."""

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
    """For `rows` in all: what takes the fewest clocks. One matrix's tiles are dealt out in whole rounds; those of
    several even out, and their rows are taken for random numbers about the mean."""
    blocks = -(-channels // GROUP)
    used = max(min(rows, matrices), 1)
    each = rows / used
    sizes = [rows] if matrices == 1 else [max(1, round(each + sign * each**0.5)) for sign in (-1, 1)]

    def clocks(config: Fp8Fp4GemmConfig) -> float:
        tiles = [(size // config.rows, size % config.rows) for size in sizes]
        of_full = tile_clocks(config, config.rows, blocks)
        total = sum(full * of_full + (tile_clocks(config, left, blocks) if left else 0) for full, left in tiles)
        across = -(-columns // config.columns)
        total *= across * used / len(sizes) / multiprocessors
        rounds = -(-across * -(-rows // config.rows) // multiprocessors)
        return total if matrices > 1 else max(total, rounds * tile_clocks(config, min(rows, config.rows), blocks))

    return min(CONFIGS, key=clocks)


def tile_clocks(config: Fp8Fp4GemmConfig, rows: int, blocks: int) -> float:
    """Of a work tile with so many rows, as the FP8 product's: the tensor cores and the multiply-adds, or shared memory,
    or a warpgroup alone; or the converters."""
    units = -(-rows // 64)
    multiplied = units * config.columns * 2 + units * config.columns // 2
    parts = config.columns // GROUP
    moved = units * (64 + config.columns) + config.rows + config.columns // 2 + parts * WIDEN_MOVES
    alone = -(-units // config.groups) * (config.columns * 5 // 2 + 100 // config.together)
    stored = TMA_STORE_CLOCKS if config.waves == 1 else STORE_CLOCKS
    return stored + blocks * (BLOCK_CLOCKS + max(multiplied, moved, alone, parts * WIDEN_CLOCKS))
