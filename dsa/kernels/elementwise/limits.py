"""What the elementwise kernels take, in plain numbers and names of torch dtypes; read by kernels, bridges and tests."""

DTYPES = ("bfloat16", "float16", "float32")
CHANNEL_MULTIPLE = 8  # of the norm and of the hyper-connections

# RMSNorm.
MAX_NORM_CHANNELS = {"bfloat16": 32768, "float16": 32768, "float32": 16384}
MAX_NORM_ROWS = 2**31 - 32
MAX_NORM_CAST_CHANNELS = {"bfloat16": 16384, "float16": 16384, "float32": 8192}  # of the norm with a cast

# Rope: pairs of channels that a thread turns at a time, if rows start at multiples of 16 bytes; one pair else.
ROTARY_PAIRS = 4
MAX_ROTARY_GROUPS = 2**31 - 512  # of so many pairs, in all rows

# Hyper-connections.
HYPER_STREAMS = 4
# Collapse: threads of a CTA, and vectors of 16 bytes that each has of a stream.
HYPER_TILES = ((128, 2), (256, 2), (512, 2), (512, 4))
MAX_HYPER_CHANNELS = 2**33 - 2**13  # of all tokens: a kernel counts their vectors, at least 4 channels each, in 31 bits
# The projection of the streams: tokens of a cluster in the kernel for few tokens, and in the other one, which takes a
# matrix of MIX_OUTPUTS outputs and streams of blocks of MIX_BLOCK channels; tokens of a tile of its persistent CTAs,
# and how many sums of a token and an output they leave to be added.
MIX_FEW_ROWS = (16, 32)
MIX_ROWS = (32, 64, 128)
MIX_PERSISTENT_ROWS = 256
MIX_HALVES = 16
MIX_OUTPUTS = 24
MIX_BLOCK = 64
MAX_MIX_TOKENS, MAX_MIX_WIDTH, MAX_MIX_OUTPUTS = 2**31 - 512, 2**30, 8 * 65535
