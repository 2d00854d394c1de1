"""Limits of multi-head attention as plain numbers and torch dtype names, for kernels, ops and tests."""

MHA_DTYPES = ("bfloat16", "float16")
MHA_DIMS = (64, 64), (128, 128), (192, 128), (256, 256)  # (d, dv) of a head
ROPE_DIMS = {(192, 128): 64, (256, 256): 64}  # rope channels that may be in a tensor of their own, shared by all heads
SELECTION_KEYS, SELECTION_WORDS = 128, 4  # keys per block, and 32-bit words of selection bits per block
