"""Limits of the elementwise kernels, as plain numbers and names of torch dtypes, for kernels, ops and tests."""

DTYPES = ("bfloat16", "float16", "float32")
CHANNEL_MULTIPLE = 8  # the channels of the norms and the hyper-connections are a multiple of this

MAX_NORM_CHANNELS = {"bfloat16": 32768, "float16": 32768, "float32": 16384}
MAX_NORM_ROWS = 2**31 - 32
MAX_NORM_CAST_CHANNELS = {"bfloat16": 16384, "float16": 16384, "float32": 8192}  # norm with a cast to FP8
MAX_NORM_ROTARY_CHANNELS = {"bfloat16": 1024, "float16": 1024, "float32": 512}
MAX_NORM_GRADIENT_CHANNELS = {"bfloat16": 8192, "float16": 8192, "float32": 4096}
MAX_NORM_GRADIENT_ROWS = 2**30  # leaves room in int32 for row indices past the end in the last iteration

# RoPE of rows with D channels, of which R are rotated. A thread processes groups of channels. A group has ROTARY_PAIRS
# pairs of channels if D and R are multiples of 8 and rows start at multiples of 16 bytes; otherwise it has one pair.
ROTARY_PAIRS = 4
MAX_ROTARY_GROUPS = 2**31 - 512  # upper limit on the groups in all rows together

HYPER_STREAMS = 4
# Collapse: (threads per CTA, 16-byte vectors per thread and stream), from the shortest rows to the longest.
HYPER_TILES = ((128, 2), (256, 2), (512, 2), (512, 4))
# Upper limit on tokens x channels: a kernel counts vectors, which have 4 channels or more, in 31 bits.
MAX_HYPER_CHANNELS = 2**33 - 2**13
# The projection of the streams.
# - MIX_FEW_ROWS: tokens per cluster of the kernel for few tokens, one variant each.
# - MIX_ROWS: tokens per cluster of the kernel for more tokens, one variant each. This kernel supports only MIX_OUTPUTS
#   outputs, and multiples of MIX_BLOCK channels.
# - MIX_PERSISTENT_ROWS: tokens per tile of that kernel's variant with persistent CTAs.
# - MIX_HALVES: partial sums per token and output that the persistent CTAs write for a second kernel to add.
MIX_FEW_ROWS = (16, 32)
MIX_ROWS = (32, 64, 128)
MIX_PERSISTENT_ROWS = 256
MIX_HALVES = 16
MIX_OUTPUTS = 24
MIX_BLOCK = 64
MAX_MIX_TOKENS, MAX_MIX_WIDTH, MAX_MIX_OUTPUTS = 2**31 - 512, 2**30, 8 * 65535

# Fused hyper-connections.
# Collapse, norm and cast, bf16: (threads of the separate collapse kernel, threads per row of the separate norm kernel,
# vectors per thread of the separate norm kernel), from the shortest rows to the longest.
HYPER_NORM_TILES = ((128, 32, 2), (128, 32, 4), (128, 64, 4), (256, 128, 4), (512, 256, 4))
# Independent streams use the second tile for the shortest rows too, with the same bits, because ptxas spills registers
# in the first one.
INDEPENDENT_NORM_TILES = HYPER_NORM_TILES[1:]
# The largest numbers of tokens of the kernel's three variants.
EXPAND_MIX_TOKENS = (1, 2, 4)
MAX_EXPAND_MIX_OUTPUTS = 2 * 65535  # two per cluster, and at most 65535 clusters in the grid's y dimension
