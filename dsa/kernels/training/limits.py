"""What the training kernels take. Plain numbers: kernels, bridges and tests read them from here."""

# Dense attention's forward pass: (channels of queries and keys, channels of values) of a head.
DENSE_CHANNELS = (64, 64), (128, 128), (192, 128)

# Absorbed (MLA) keys, of which the first MLA_V_CHANNELS numbers are the value.
MLA_CHANNELS, MLA_V_CHANNELS = (576, 512), 512

# The warm-up's loss against the sum of the heads: channels of the attention's heads.
WARMUP_CHANNELS = 64, 128, 192, 576

# The indexer's tensors: what its kernels take without padding.
INDEX_HEADS, INDEX_CHANNELS = (8, 16, 32, 64), (64, 128)
MAX_INDEX_HEADS = max(INDEX_HEADS)
Q_TILE = 128  # queries of a q tile
K_TILE = 128  # keys of a tile of scores
Q_TILE_FIELDS = 8
MAX_Q_TILES = 1024  # that one launch of the key gradient takes

# The sparse stage: keys of a query, and heads, that are multiplied together.
SPARSE_DTYPES = "bfloat16", "float16"
SPARSE_KEY_TILE, SPARSE_HEAD_TILE = 64, 64
MAX_SPARSE_HEADS, MAX_SPARSE_KEYS = 128, 2048  # of the loss; attention's gradients take any number
