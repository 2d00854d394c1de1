"""What the kernel of `linear_fp32` takes, in plain numbers and names of torch dtypes; read by kernel, bridge and
tests."""

DTYPES = ("bfloat16", "float16")
CHANNEL_MULTIPLE = 32
MAX_TOKENS = 64
TILE_TOKENS = (8, 16, 32)  # of a tile: the smallest one that has all tokens, else the largest
ROWS = 16  # of the matrix, of a tile
MAX_ROWS = 65535 * ROWS
# Tiles of which each is a cluster: as many as are resident at once, but for two. More are a CTA each, if they have
# channels enough.
CLUSTERS = 32
LEAST_CHANNELS = 2048  # of a CTA by itself


def choose_config(tokens: int, rows: int, channels: int) -> tuple[int, int]:
    """(tokens of a tile, CTAs of a tile). Bits do not depend on it."""
    tile = next((tile for tile in TILE_TOKENS if tokens <= tile), TILE_TOKENS[-1])
    tiles = -(-tokens // tile) * -(-rows // ROWS)
    return tile, 8 if tiles <= CLUSTERS or channels < LEAST_CHANNELS else 1
