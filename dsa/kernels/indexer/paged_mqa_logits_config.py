"""Tile configurations of the index scores over a paged key cache, and the choice between fp16 and fp32 accumulation."""

from dataclasses import dataclass

from dsa.cute.sm90 import SHARED_BYTES, WARPGROUP
from dsa.cute.tuning import choices, tuned
from dsa.kernels.indexer.score_tile import TILE, registers_fit

# Up to this many columns per tile, fp16 accumulation gains nothing. Fewer than 32 would not fill the warps that scale
# the queries.
MEMORY_BOUND_COLUMNS = 128


@dataclass(frozen=True)
class PagedMqaLogitsConfig:
    """stages: key tiles in flight per consumer warpgroup. sequences: stages of queries. groups: number of consumer
    warpgroups."""

    stages: int = choices(2, 3, 4, 5, 8)
    sequences: int = choices(2, 4)
    groups: int = choices(2, 3, 4)

    @property
    def threads(self) -> int:
        return (self.groups + 1) * WARPGROUP

    def fits(self, columns: int, half: bool = False) -> bool:
        """Whether the hardware can run this: enough registers (fp16 accumulation takes half as many), and enough shared
        memory for 128 channels."""
        factors = 4 * self.sequences * columns if half else 0
        shared = (self.sequences * columns + self.groups * self.stages * TILE) * 132 + factors + 3 * 1024
        return registers_fit(columns // 2 if half else columns, self.groups) and shared <= SHARED_BYTES


# For fp16 accumulation, whose small accumulators leave room for a third warpgroup.
HALF_CONFIG = PagedMqaLogitsConfig(stages=4, sequences=2, groups=3)


def bound_by_arithmetic(heads: int, next_n: int) -> bool:
    """Whether fp16 accumulation is faster. With fewer columns, loading the keys takes longer than fp32 accumulation."""
    return heads * next_n > MEMORY_BOUND_COLUMNS


def choose_config(heads: int, next_n: int, half: bool = False) -> PagedMqaLogitsConfig:
    """The measured winner."""
    if half:
        return HALF_CONFIG
    return tuned(PagedMqaLogitsConfig, "fp8_paged_mqa_logits", "sm_90", f"columns {heads * next_n}")
