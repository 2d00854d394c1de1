"""Sizes and schedule of the candidate passes: capacity of the lists, strides of the passes, ranks of the bounds.

With many keys, the op indexer_select scores them in several passes, and stores only few of the scores. Each query has a
list of candidates: the keys whose scores are not below the query's bound. The first pass scores every `strides[0]`-th
key tile (see `pass_strides`). The second pass scores every `strides[1]`-th tile except those already scored, and so on.
The last pass scores all remaining tiles. After each pass but the last, the scores so far are a sample of all scores.
The r-th largest of them (see `bound_ranks`), or a number slightly below it, is the bound for the next pass. The kernels
and the op's host code read these numbers.
"""

import functools
import itertools
import math

LOG_TILE, LOG_GROUP = 6, 4
TILE, GROUP = 1 << LOG_TILE, 1 << LOG_GROUP  # keys per tile; keys per TMA copy, which are one warp's 16 rows of a wgmma
PARTS = TILE // GROUP
CAPACITY = 4080  # candidates per list, 8 bytes each; with its counts and bound, a list takes less than 32 KiB
BATCH = 4  # loops over the candidates in registers skip this many registers at once if they are empty in all lanes
SAMPLE_TILES = 96  # the first pass scores at most this many tiles, and stores all their scores
SAMPLES = SAMPLE_TILES * TILE
FINAL_STRIDE = 4  # the bound for the last pass comes from every 4th key tile
MOST_RATIO = 64  # largest ratio of the strides of consecutive passes
LOG_MAX_KEYS = 28
MAX_KEYS = 1 << LOG_MAX_KEYS  # with fewer keys, the product of the numbers of key tiles and CTAs fits an int32
NOTHING_LEFT = -(2**31)  # value in `remaining` (candidate_select_sm90.py) of a query whose result is complete


def pass_strides(keys: int) -> tuple[int, ...]:
    """Return the stride of each pass, in key tiles, for `keys` keys. The last stride is 1."""
    tiles = -(-(-(-keys // GROUP) + 1) // PARTS)  # upper bound: a block's first key can be inside a group
    strides = [FINAL_STRIDE]
    while -(-tiles // strides[0]) > SAMPLE_TILES:
        fits = 1 << (-(-tiles // SAMPLE_TILES) - 1).bit_length()
        strides.insert(0, min(MOST_RATIO * strides[0], max(4 * strides[0], fits)))
    return (*strides, 1)


@functools.lru_cache(4096)
def bound_ranks(k: int, strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return, for each pass but the last, the rank (1: the largest) that the next pass's bound has among the scores so
    far.

    Let e = k / stride. This is the expected rank of the k-th largest score of all keys among the scores so far. The
    standard deviation is sqrt(e). The rank is e + 8 sqrt(e) + 2 for the last pass, and e + 7 sqrt(e) + 2 for an earlier
    pass. A limit keeps lists from overflowing: the last pass is expected to list at most (k + CAPACITY) / 2 candidates,
    an earlier pass at most 0.6 CAPACITY.
    """
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
    """Return the number of CTAs of a pass on `sms` SMs. At most two CTAs process a block of `block_q` queries: each
    appends at one end of a list."""
    blocks = -(-queries // block_q)
    return 2 * blocks if 2 * blocks <= sms else min(blocks, sms)
