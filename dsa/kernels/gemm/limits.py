"""Limits of the FP8 product and cast kernels, as plain numbers and names of torch dtypes. Kernels, bridges and tests
read them."""

GROUP = 128  # channels that share a scale

# Products.
OUT_DTYPES = ("float32", "bfloat16", "float16")
K_MULTIPLE, N_MULTIPLE = 16, 8  # channels and columns are multiples of these
MAX_MATRICES = 1024  # of a grouped product
MAX_ROWS = 2**27  # of all matrices together
MAX_COLUMNS = 2**31 - 1  # of all matrices together: they are stacked as rows, and an int32 holds a row's index
# Grouped products use a dynamic scheduler from this many rows on, in total and per matrix on average. The counter must
# be zeroed, which takes 2 us. With fewer rows all work tiles take the same time.
DYNAMIC_ROWS, DYNAMIC_ROWS_OF_A_MATRIX = 1024, 32

# Casts.
CAST_DTYPES = ("bfloat16", "float16", "float32")
# channels are a multiple of this, so in a partial last group a vector is valid or padding as a whole
SWIGLU_MULTIPLE = 8
ROTARY_MULTIPLE = 8  # the number of rotated channels is a multiple of this
