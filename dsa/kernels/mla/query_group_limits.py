"""How queries with few heads are grouped where they share keys: plain numbers, for kernels, ops and tests."""

# Queries per group, keyed by the largest number of heads for which TILE_M rows hold that many queries.
GROUP_SIZES = {8: 8, 16: 4}
MEMBER_SHIFT = 24  # a key in a group's list is below 2^24; the bits above say which queries have selected it
# A group is computed as one if the union of its selections is at most this share of their sum. A tile of a
# group takes 1.3 times as long as a tile of a single query (2806 and 2140 cycles).
MOST_UNION = (7, 10)
