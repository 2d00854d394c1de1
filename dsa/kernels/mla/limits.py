"""What the MLA kernels take, in plain numbers and names of torch dtypes: kernels, bridges and tests read it here."""

DTYPES = ("bfloat16", "float16")  # of q, of a 16-bit cache and of out

# Absorbed MLA: a value is the first HEAD_DIM_V channels of its key; a key of HEAD_DIM has 64 rope channels behind them.
HEAD_DIM, HEAD_DIM_V = 576, 512
ROTATED_BACK = 64  # the last channels of a result of V4, which are turned back behind its attention
SPARSE_HEAD_DIMS = (HEAD_DIM, HEAD_DIM_V)
FP8_KV_BYTES = {HEAD_DIM: 656, HEAD_DIM_V: 584}  # of a key in an FP8 cache, by head dim

TILE_N = 64  # keys of a work tile's step
TILE_M = 64  # rows (query tokens x heads) of a CTA
SWAP_AB_HEADS = (16, 32)  # heads of a CTA of the kernel that has heads as columns
FP8_KV_HEADS = (16, 32, 64)  # heads of a CTA of the kernel for FP8 caches

PAGE_MULTIPLE = 16  # keys of a page of a dense cache
MAX_BATCH = 32768  # sequences of a plan
PLAN_COLUMNS, PLAN_NUMBERS = 8, 6  # of a plan's row, as FlashMLA has it, and of those that mean something; others are 0
MAX_PARTS = 160  # CTAs per row tile that a plan is for, and so splits of a sequence
# Splits that depend on nothing but the sequence's length: at least so many tiles each, at most so many.
FIXED_SPLIT_TILES, MAX_FIXED_SPLITS = 64, 32

MERGE_DTYPES = (*DTYPES, "float32")
MAX_BRANCHES = 4
MERGE_CHANNEL_MULTIPLE = 8
MAX_MERGE_ROWS = 2**31 - 8

MAX_WINDOW = 2**30  # queries, columns and keys of a page: a step beyond one of these is still an int32
