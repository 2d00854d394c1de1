"""How queries of few heads are grouped where they share keys, in plain numbers, for kernels, bridges and tests."""

# Groups of queries that share keys, by the number of heads up to which TILE_M rows hold so many queries.
GROUP_SIZES = {8: 8, 16: 4}
MEMBER_SHIFT = 24  # a key of a group's list is below 2^24; the bits above say which queries have selected it
# A group is computed as one where the union of its selections is at most this share of their sum: a tile of it takes
# as long as 1.3 tiles of a query by itself (2806 clocks and 2140).
MOST_UNION = (7, 10)
