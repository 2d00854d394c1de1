"""Limits of the `linear_fp32` kernel, as plain numbers and names of torch dtypes. The kernel, the op and tests read
them."""

DTYPES = ("bfloat16", "float16")
CHANNEL_MULTIPLE = 32
MAX_TOKENS = 64
TILE_TOKENS = (8, 16, 32)  # tokens per tile: the smallest number that is enough for all tokens, else the largest
ROWS = 16  # rows of the matrix per tile
MAX_ROWS = 65535 * ROWS  # 65535 is the limit of a grid's second dimension
# Up to this many tiles, a cluster of 8 CTAs computes each tile. At most 30 clusters are resident at once, so two of 32
# wait.
CLUSTERS = 32
LEAST_CHANNELS = 2048  # with fewer channels, a cluster computes each tile


def choose_config(tokens: int, rows: int, channels: int) -> tuple[int, int]:
    """-> (tokens per tile, CTAs per tile). The product has the same bits for any choice."""
    tile = next((tile for tile in TILE_TOKENS if tokens <= tile), TILE_TOKENS[-1])
    tiles = -(-tokens // tile) * -(-rows // ROWS)
    return tile, 8 if tiles <= CLUSTERS or channels < LEAST_CHANNELS else 1
