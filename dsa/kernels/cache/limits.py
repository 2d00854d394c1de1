"""What the caches' kernels take, in plain numbers and names of torch dtypes; read by kernels, bridges and tests."""

# Index keys.
INDEX_HEAD_DIMS = (32, 64, 128)

# MLA's cache.
FLOAT_DTYPES = ("bfloat16", "float16", "float32")  # of rows, and of a cache of floats
FP8_LAYOUTS = ("v32", "v4")
CHANNEL_MULTIPLE = 8  # of rows of floats
# Written straight from the projection: channels of a row, those of the norm, and those that rope turns.
LATENT_CHANNELS, NORM_CHANNELS, ROPE_CHANNELS = (576, 512), 512, 64

# The compressor's entries: (channels, tokens, whether blocks overlap), of projections of these dtypes.
COMPRESSED_KINDS = ((512, 4, True), (512, 128, False), (128, 4, True))
COMPRESSED_DTYPES = ("float32", "bfloat16")

# Where rows lie: tokens, rows of a page, tokens of a row.
MAX_MAPPED = 2**30
