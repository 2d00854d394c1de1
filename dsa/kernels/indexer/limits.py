"""Shapes and dtypes of the indexer's kernels, as plain numbers and torch dtype names for kernels, bridges and tests."""

# Scores: FP8 queries times FP8 keys.
HEADS, HEAD_DIMS = (8, 16, 32, 64), (32, 64, 128)
LOGITS_DTYPES = ("float32", "bfloat16")
NEXT_N = (1, 2, 3, 4)  # query tokens per sequence, for scores over a paged cache
PAGE_SIZES = (32, 64)  # keys per page of the paged cache
SCHEDULE_SPLIT = 256  # keys per split in the schedule of the paged scores

# Inputs: the conversion of projected queries and keys to FP8.
INPUT_DTYPES = ("bfloat16", "float16", "float32")
ROTATED = (32, 64, 128)  # channels that RoPE rotates

# Scores and selection in one op.
MAX_SELECTED = 2048  # largest k
TWO_OPS_KEYS = 8192  # with up to this many keys, a query's fp32 scores need no more memory than a list of candidates

# Top-k.
TOPK_DTYPES = ("float32", "bfloat16")  # dtypes of the scores
MAX_K, MAX_COLS = 4096, 2**30
# Bits of the kernels' argument `options`: which optional tensors the caller passes, and which variants it asks for.
STARTS, LENGTHS, PAGED, ROW_TO_SEQ, BY_VALUE, VALUES = (1 << i for i in range(6))
