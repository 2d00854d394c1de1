"""Limits of the MLA kernels as plain numbers and torch dtype names, for kernels, ops and tests."""

DTYPES = ("bfloat16", "float16")  # dtypes of q, of a 16-bit cache and of out

# Absorbed MLA: the value is the first HEAD_DIM_V channels of the key. A key of HEAD_DIM has 64 rope channels
# after them.
HEAD_DIM, HEAD_DIM_V = 576, 512
ROTATED_BACK = 64  # last channels of a V4 result, which are rotated back after attention
SPARSE_HEAD_DIMS = (HEAD_DIM, HEAD_DIM_V)
FP8_KV_BYTES = {HEAD_DIM: 656, HEAD_DIM_V: 584}  # bytes of a key in an FP8 cache, by head dim

TILE_N = 64  # keys per tile, the step of a mainloop
TILE_M = 64  # rows (query tokens x heads) per CTA
SWAP_AB_HEADS = (16, 32)  # heads per CTA of the swap A/B kernel for 16-bit caches
FP8_KV_HEADS = (16, 32, 64)  # heads per CTA of the kernel for FP8 caches

PAGE_MULTIPLE = 16  # page sizes of a dense cache are multiples of this
MAX_BATCH = 32768  # sequences per plan
PLAN_COLUMNS, PLAN_NUMBERS = 8, 6  # columns of a plan, as in FlashMLA, and how many are used; the others are 0
MAX_PARTS = 160  # parts of a plan at most, and so splits per sequence
# Splits that depend only on the sequence's length: tiles per split at least, splits per sequence at most.
FIXED_SPLIT_TILES, MAX_FIXED_SPLITS = 64, 32

MERGE_DTYPES = (*DTYPES, "float32")
MAX_BRANCHES = 4
MERGE_CHANNEL_MULTIPLE = 8
MAX_MERGE_ROWS = 2**31 - 8

MAX_WINDOW = 2**30  # of queries, columns and keys per page; one step past it still fits in int32
