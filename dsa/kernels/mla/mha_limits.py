"""What multi-head attention takes, in plain numbers and names of torch dtypes, for kernels, bridges and tests."""

MHA_DTYPES = ("bfloat16", "float16")
MHA_DIMS = (64, 64), (128, 128), (192, 128), (256, 256)  # (d, dv) of a head
ROPE_DIMS = {(192, 128): 64, (256, 256): 64}  # channels of a key that can be apart, the same for all heads
SELECTION_KEYS, SELECTION_WORDS = 128, 4  # keys of a block, and the words of 32 bits that say which are selected
