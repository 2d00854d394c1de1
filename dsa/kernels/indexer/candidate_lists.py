"""The candidates of the selection: lists of a query's keys whose scores are not below a bound, how long these are, and
which parts of the keys give the bounds. In plain numbers, read by kernels and bridge.

Passes over a part of the key tiles each: every `strides[0]`-th, then every `strides[1]`-th but for those, and so on, at
last all others. Behind a pass the scores seen so far are a sample of all, and their r-th largest is a bound for the
next one.
"""

import functools
import itertools
import math

LOG_TILE, LOG_GROUP = 6, 4
TILE, GROUP = 1 << LOG_TILE, 1 << LOG_GROUP  # keys of a tile, and of a copy: at least the 16 of a warp
PARTS = TILE // GROUP
CAPACITY = 4080  # candidates of a query, 8 bytes each: with what else there is of it less than 32 KiB
BATCH = 4  # of a thread's candidates in registers, which are passed over together where there are none
SAMPLE_TILES = 96  # scores of as many tiles are kept for the first bound
SAMPLES = SAMPLE_TILES * TILE
FINAL_STRIDE = 4  # a quarter of the keys gives the last bound
MOST_RATIO = 64  # of the strides of two passes
LOG_MAX_KEYS = 28
MAX_KEYS = 1 << LOG_MAX_KEYS  # products of tiles and CTAs are int32
NOTHING_LEFT = -(2**31)  # the end of a query's keys that has its result


def pass_strides(keys: int) -> tuple[int, ...]:
    """Of all passes, the last of which is 1."""
    tiles = -(-(-(-keys // GROUP) + 1) // PARTS)  # at most: a first group may begin before the first key
    strides = [FINAL_STRIDE]
    while -(-tiles // strides[0]) > SAMPLE_TILES:
        fits = 1 << (-(-tiles // SAMPLE_TILES) - 1).bit_length()
        strides.insert(0, min(MOST_RATIO * strides[0], max(4 * strides[0], fits)))
    return (*strides, 1)


@functools.lru_cache(4096)
def bound_ranks(k: int, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Behind each pass but the last, the rank of the bound from the top of what was seen.

    The k-th largest of all keys is expected at rank e = k / stride of the sample, give or take sqrt(e). The bound of
    the last pass is halfway between k candidates and as many as there is room for, or at 8 deviations; those before are
    at 7, and at most at what fills 0.6 of the list in the next pass."""
    ranks = []
    for stride, following in itertools.pairwise(strides):
        expected = k / stride
        if following == 1:
            rank = min((k + CAPACITY) / 2 / stride, expected + 8 * math.sqrt(expected) + 2)
        else:
            rank = min(0.6 * CAPACITY * following / stride, expected + 7 * math.sqrt(expected) + 2)
        ranks.append(max(1, math.ceil(rank)))
    return tuple(ranks)


def choose_ctas(queries: int, block_q: int, sms: int) -> int:
    """Of a pass: at most two of them share a block of queries."""
    blocks = -(-queries // block_q)
    return 2 * blocks if 2 * blocks <= sms else min(blocks, sms)
