"""Sizes and schedule of the candidate passes: capacity of the lists, strides of the passes, ranks of the bounds.

Each query has a list of the keys whose scores are not below its bound. Each pass scores a part of the key tiles. The
first pass takes every `strides[0]`-th tile, the second every `strides[1]`-th tile except those already scored, and so
on. The last pass takes all remaining tiles. After each pass, the scores so far are a sample of all scores, and their
r-th largest is a bound for the next pass. Kernels and the bridge read these plain numbers.
"""

import functools
import itertools
import math

LOG_TILE, LOG_GROUP = 6, 4
TILE, GROUP = 1 << LOG_TILE, 1 << LOG_GROUP  # keys per tile, and per copy: at least the 16 of a warp
PARTS = TILE // GROUP
CAPACITY = 4080  # candidates per query, 8 bytes each: with the query's other data, less than 32 KiB
BATCH = 4  # candidates per thread that a loop skips together if the warp has none of them
SAMPLE_TILES = 96  # the first pass keeps the scores of at most this many tiles
SAMPLES = SAMPLE_TILES * TILE
FINAL_STRIDE = 4  # the last bound comes from a quarter of the keys
MOST_RATIO = 64  # between the strides of consecutive passes
LOG_MAX_KEYS = 28
MAX_KEYS = 1 << LOG_MAX_KEYS  # so that products of tiles and CTAs fit an int32
NOTHING_LEFT = -(2**31)  # in `remaining`: the query's result is complete


def pass_strides(keys: int) -> tuple[int, ...]:
    """Strides of all passes. The last stride is 1."""
    tiles = -(-(-(-keys // GROUP) + 1) // PARTS)  # upper bound: the first group may begin before the first key
    strides = [FINAL_STRIDE]
    while -(-tiles // strides[0]) > SAMPLE_TILES:
        fits = 1 << (-(-tiles // SAMPLE_TILES) - 1).bit_length()
        strides.insert(0, min(MOST_RATIO * strides[0], max(4 * strides[0], fits)))
    return (*strides, 1)


@functools.lru_cache(4096)
def bound_ranks(k: int, strides: tuple[int, ...]) -> tuple[int, ...]:
    """For each pass but the last, the rank (1: the largest) of the next pass's bound among the scores so far.

    The k-th largest of all keys is expected at rank e = k / stride of the sample, with a standard deviation of sqrt(e).
    The last pass's bound aims halfway between k candidates and a full list, or at e + 8 deviations, whichever is less.
    The earlier bounds aim at e + 7 deviations, but at most at the rank that fills 0.6 of the list in the next pass."""
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
    """Number of CTAs of a pass. At most two CTAs share a block of queries."""
    blocks = -(-queries // block_q)
    return 2 * blocks if 2 * blocks <= sms else min(blocks, sms)
