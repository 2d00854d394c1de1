"""What the indexer's kernels take, in plain numbers and names of torch dtypes; read by kernels, bridges and tests."""

# Scores: of queries and keys in FP8.
HEADS, HEAD_DIMS = (8, 16, 32, 64), (32, 64, 128)
LOGITS_DTYPES = ("float32", "bfloat16")
NEXT_N = (1, 2, 3, 4)  # query tokens of a sequence, of scores over a paged cache
PAGE_SIZES = (32, 64)  # of that cache
SCHEDULE_SPLIT = 256  # keys of a split of its schedule

# Inputs: from their projections to FP8.
INPUT_DTYPES = ("bfloat16", "float16", "float32")
ROTATED = (32, 64, 128)  # channels that rope turns

# Top-k.
TOPK_DTYPES = ("float32", "bfloat16")  # of scores
MAX_K, MAX_COLS = 4096, 2**30
# What the caller gives, as bits of the kernel's argument `options`.
STARTS, LENGTHS, PAGED, ROW_TO_SEQ, BY_VALUE, VALUES = (1 << i for i in range(6))
