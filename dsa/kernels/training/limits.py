"""Shapes and dtypes that the training kernels accept, as plain numbers and torch dtype names, for kernels, ops and
tests."""

# (query and key channels, value channels) per head in the forward pass of dense attention.
DENSE_CHANNELS = (64, 64), (128, 128), (192, 128)

# Numbers of channels of an absorbed (MLA) key, with and without a rope part. The first MLA_V_CHANNELS channels are the
# value.
MLA_CHANNELS, MLA_V_CHANNELS = (576, 512), 512

# Channels per attention head in the warm-up loss, whose target is the attention distribution averaged over heads.
WARMUP_CHANNELS = 64, 128, 192, 576

# Sizes of the indexer's tensors that the kernels accept without padding.
INDEX_HEADS, INDEX_CHANNELS = (8, 16, 32, 64), (64, 128)
MAX_INDEX_HEADS = max(INDEX_HEADS)
Q_TILE = 128  # queries per q tile
K_TILE = 128  # keys per score tile
Q_TILE_FIELDS = 8  # numbers per row of `q_tiles` (q_tiles.py)
MAX_Q_TILES = 1024  # a launch of the key gradient takes at most this many q tiles

# The sparse stage: attention to selected keys, and the loss over them. Attention's gradients accept SPARSE_DTYPES; the
# loss accepts only bf16. A tile has SPARSE_KEY_TILE selected keys and SPARSE_HEAD_TILE heads. The loss accepts up to
# MAX_SPARSE_HEADS heads, and up to MAX_SPARSE_KEYS selected keys per query; attention's gradients accept any numbers.
SPARSE_DTYPES = "bfloat16", "float16"
SPARSE_KEY_TILE, SPARSE_HEAD_TILE = 64, 64
MAX_SPARSE_HEADS, MAX_SPARSE_KEYS = 128, 2048
