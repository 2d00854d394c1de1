"""What the kernels of FP8 products and casts take, in plain numbers and names of torch dtypes; read by kernels, bridges
and tests."""

GROUP = 128  # channels that share a scale

# Products.
OUT_DTYPES = ("float32", "bfloat16", "float16")
K_MULTIPLE, N_MULTIPLE = 16, 8  # of channels, and of columns
MAX_MATRICES = 1024  # of a grouped product
MAX_ROWS = 2**27  # of all matrices together
MAX_COLUMNS = 2**31 - 1  # of all matrices together: one after the other they are rows, numbered by an int32
# From so many rows on, in all and on average, several matrices' work tiles are drawn: the counter has to be zeroed,
# which takes 2 us, and with fewer rows each work tile is as long as any other.
DRAWN_ROWS, DRAWN_ROWS_OF_A_MATRIX = 1024, 32

# Casts.
CAST_DTYPES = ("bfloat16", "float16", "float32")
SWIGLU_MULTIPLE = 8  # of channels; those of a vector are there or not together, where the last group ends early
