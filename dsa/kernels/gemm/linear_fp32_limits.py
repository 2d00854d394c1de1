"""Limits of the `linear_fp32` kernel, as plain numbers and names of torch dtypes. The kernel, the bridge and tests read
them."""

DTYPES = ("bfloat16", "float16")
CHANNEL_MULTIPLE = 32
MAX_TOKENS = 64
TILE_TOKENS = (8, 16, 32)  # per tile: the smallest that holds all tokens, else the largest
ROWS = 16  # of the matrix, per tile
MAX_ROWS = 65535 * ROWS
# Up to this many tiles, each tile is computed by a cluster; all but two of these clusters are resident at once. More
# tiles are computed by one CTA each if they have enough channels.
CLUSTERS = 32
LEAST_CHANNELS = 2048  # of a tile that one CTA computes


def choose_config(tokens: int, rows: int, channels: int) -> tuple[int, int]:
    """(tokens of a tile, CTAs of a tile). The result has the same bits for any choice."""
    tile = next((tile for tile in TILE_TOKENS if tokens <= tile), TILE_TOKENS[-1])
    tiles = -(-tokens // tile) * -(-rows // ROWS)
    return tile, 8 if tiles <= CLUSTERS or channels < LEAST_CHANNELS else 1
