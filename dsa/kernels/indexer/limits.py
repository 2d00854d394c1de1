"""Shapes and dtypes that the indexer's kernels accept, as plain numbers and names of torch dtypes, for kernels, ops and
tests."""

# Scores: FP8 queries times FP8 keys.
HEADS, HEAD_DIMS = (8, 16, 32, 64), (32, 64, 128)
LOGITS_DTYPES = ("float32", "bfloat16")
NEXT_N = (1, 2, 3, 4)  # query tokens per sequence in the paged scores
PAGE_SIZES = (32, 64)  # keys per page in the paged scores
SCHEDULE_SPLIT = 256  # keys per split, the unit in which the schedule of the paged scores counts work

# Inputs: the conversion of projected queries and keys to FP8.
INPUT_DTYPES = ("bfloat16", "float16", "float32")
ROTATED = (32, 64, 128)  # how many of the 128 channels RoPE rotates

# Scores and selection in one op.
MAX_SELECTED = 2048  # largest k
TWO_OPS_KEYS = 8192  # up to this many keys the op stores all scores: 32 KiB per query, as large as a list of candidates

# Top-k.
TOPK_DTYPES = ("float32", "bfloat16")  # dtypes of the scores
MAX_K, MAX_COLS = 4096, 2**30
# Bits of the kernels' argument `options`. STARTS, LENGTHS, ROW_TO_SEQ: the caller passes this tensor. PAGED: the caller
# passes a block table, so the results are cache slots. BY_VALUE: sort the results by descending score. VALUES: return
# the scores, too.
STARTS, LENGTHS, PAGED, ROW_TO_SEQ, BY_VALUE, VALUES = (1 << i for i in range(6))
