"""Limits of the cache kernels, as plain numbers and names of torch dtypes, for kernels, ops and tests."""

INDEX_HEAD_DIMS = (32, 64, 128)

FLOAT_DTYPES = ("bfloat16", "float16", "float32")  # dtypes of rows and of a float cache
FP8_LAYOUTS = ("v32", "v4")
CHANNEL_MULTIPLE = 8  # the channels of a float row are a multiple of this
# Writes of MLA rows from the projection: channels per row, channels that the norm covers, channels that RoPE rotates.
LATENT_CHANNELS, NORM_CHANNELS, ROPE_CHANNELS = (576, 512), 512, 64

# Entries of the compressor: (channels, tokens per block, whether an entry is computed from two blocks).
COMPRESSED_KINDS = ((512, 4, True), (512, 128, False), (128, 4, True))
COMPRESSED_DTYPES = ("float32", "bfloat16")  # dtypes of the compressor's projections

# Slot mapping: the largest number of tokens, of rows per page, and of tokens per row.
MAX_MAPPED = 2**30
