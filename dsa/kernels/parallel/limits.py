"""Limits of the kernels for several GPUs, as plain numbers."""

DTYPES = ("bfloat16", "float32")
RANKS = (2, 3, 4, 5, 6, 7, 8)
HALVES = 2  # buffers between which consecutive sums alternate
PART = 8  # bytes of a tensor per 16-byte packet; the other 8 contain the number of the sum twice
