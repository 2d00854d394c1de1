"""What the kernels take, in plain numbers."""

DTYPES = ("bfloat16", "float32")
RANKS = (2, 3, 4, 5, 6, 7, 8)
HALVES = 2  # of the memory of a sum, which takes them in turn
PART = 8  # bytes of a tensor that travel together, beside as many that say which sum they are of
