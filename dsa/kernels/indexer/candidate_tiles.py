"""Which keys make up a key tile where any part of the tiles must be a fair sample of all keys.

The keys that a block of queries sees, from the least key of a range to the last, are groups of 16 neighbours, and the
groups are four parts of `tiles` groups each. Tile r has the r-th group of every part, one for each warp of a warpgroup:
key (base + part * tiles + r) * 16 + i. So every S-th tile has every S-th group of all parts, a fairer sample than tiles
of 64 neighbours, and four copies load a tile.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from dsa.kernels.indexer.candidate_lists import GROUP, LOG_GROUP, LOG_TILE, PARTS

NO_KEY = 2**30


class Frame(NamedTuple):
    """base: the first group of a block's keys; tiles: as many as its key tiles."""

    base: Int32
    tiles: Int32


@cute.jit
def key_range(starts, ends, query, keys):
    """(the first key that the query sees, how many keys), inside the keys whatever the ranges say. Both ends are
    clipped before they are subtracted: the difference of any two int32 may be none."""
    start = cutlass.min(cutlass.max(starts[query], 0), keys)
    end = cutlass.min(cutlass.max(ends[query], start), keys)
    return start, end - start


@cute.jit
def frame_of(block, block_q, starts, ends, keys, lane) -> Frame:
    """Of a block of `block_q` queries. A warp's work."""
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
    """How many of the tiles are every 2^log_stride-th."""
    return (frame.tiles + (Int32(1) << log_stride) - 1) >> log_stride
