"""Limits of the FP8 product and cast kernels, as plain numbers and names of torch dtypes. Kernels, ops and tests read
them."""

GROUP = 128  # channels that share a scale

OUT_DTYPES = ("float32", "bfloat16", "float16")
K_MULTIPLE, N_MULTIPLE = 16, 8  # channels and columns of FP8 products are multiples of these
MAX_MATRICES = 1024  # per grouped product
MAX_ROWS = 2**27  # rows of the result, over all matrices
MAX_COLUMNS = 2**31 - 1  # over all matrices: they are rows of one tensor b, indexed by an int32
# Grouped FP8 products that do not gather rows use a dynamic scheduler from this many expected rows on. With fewer rows
# all work tiles take about the same time, and zeroing the tile counter costs 2 us.
DYNAMIC_ROWS, DYNAMIC_ROWS_OF_A_MATRIX = 1024, 32

CAST_DTYPES = ("bfloat16", "float16", "float32")
# The number of channels is a multiple of this, so a vector of 8 channels is either valid or padding.
SWIGLU_MULTIPLE = 8
ROTARY_MULTIPLE = 8  # the number of channels that RoPE rotates is a multiple of this
