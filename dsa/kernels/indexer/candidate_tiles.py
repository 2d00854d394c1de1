"""Key tiles of the candidate passes, built so that a regular subset of the tiles is a fair sample of all keys.

The keys that a block of queries sees, from the smallest start to the largest end, are divided into groups of 16
neighbours. The groups form four parts of `tiles` groups each. Tile r has the r-th group of every part, one for each
warp of a warpgroup: key (base + part * tiles + r) * 16 + i. So every S-th tile has every S-th group of all parts. That
is a fairer sample than tiles of 64 neighbours would give. Four copies load a tile.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.kernels.indexer.candidate_lists import GROUP, LOG_GROUP, LOG_TILE, PARTS

NO_KEY = 2**30


class Frame(NamedTuple):
    """base: the first group of a block's keys. tiles: number of its key tiles, and of groups per part."""

    base: Int32
    tiles: Int32


@cute.jit
def key_range(starts, ends, query, keys):
    """(first key that the query sees, number of keys), clipped to the existing keys. Both ends are clipped before the
    subtraction, because the difference of two int32 may overflow."""
    start = cutlass.min(cutlass.max(starts[query], 0), keys)
    end = cutlass.min(cutlass.max(ends[query], start), keys)
    return start, end - start


@cute.jit
def frame_of(block, block_q, starts, ends, keys, lane) -> Frame:
    """Frame of a block of `block_q` queries. The whole warp calls this."""
    low, high = Int32(NO_KEY), Int32(0)
    query = block * block_q + lane
    if lane < block_q and query < starts.shape[0]:
        start, length = key_range(starts, ends, query, keys)
        if length > 0:
            low, high = start, start + length
    low = cute.arch.warp_redux_sync(low, "min")
    high = cute.arch.warp_redux_sync(high, "max")
    base = low >> LOG_GROUP
    groups = cutlass.max(((high + GROUP - 1) >> LOG_GROUP) - base, 0)
    return Frame(base, (groups + PARTS - 1) >> (LOG_TILE - LOG_GROUP))


@cute.jit
def tiles_of_pass(frame: Frame, log_stride):
    """Number of tiles if every 2^log_stride-th one counts, from the first on."""
    return (frame.tiles + (Int32(1) << log_stride) - 1) >> log_stride
