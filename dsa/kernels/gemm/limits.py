"""Limits of the FP8 product and cast kernels, as plain numbers and names of torch dtypes. Kernels, ops and tests read
them."""

GROUP = 128  # channels that share a scale

# Products.
OUT_DTYPES = ("float32", "bfloat16", "float16")
K_MULTIPLE, N_MULTIPLE = 16, 8  # channels and columns of FP8 products are multiples of these
MAX_MATRICES = 1024  # per grouped product
MAX_ROWS = 2**27  # rows of the result, over all matrices
MAX_COLUMNS = 2**31 - 1  # over all matrices: their columns are the rows of one tensor b, and a row's index is an int32
# Grouped FP8 products that do not gather rows use a dynamic scheduler if they expect at least this many rows, in total
# and per matrix on average. With fewer rows all work tiles take about the same time, so the 2 us for zeroing the tile
# counter would be lost.
DYNAMIC_ROWS, DYNAMIC_ROWS_OF_A_MATRIX = 1024, 32

# Casts.
CAST_DTYPES = ("bfloat16", "float16", "float32")
# The number of channels is a multiple of this, so a vector of 8 channels is either valid or padding.
SWIGLU_MULTIPLE = 8
ROTARY_MULTIPLE = 8  # the number of channels that RoPE rotates is a multiple of this
