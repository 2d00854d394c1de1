"""Limits of the MLA kernels as plain numbers and torch dtype names, for kernels, ops and tests.

This module does not import CUTLASS, so ops can check their arguments without it.
"""

DTYPES = ("bfloat16", "float16")  # dtypes of q and of a 16-bit cache

# Absorbed MLA: the value is the first HEAD_DIM_V channels of the key. A key of HEAD_DIM channels has 64 rope channels
# after the value. A key of HEAD_DIM_V channels (DeepSeek-V4) ends with the value: the whole key is the value.
HEAD_DIM, HEAD_DIM_V = 576, 512
ROTATED_BACK = 64  # after attention, DeepSeek-V4 rotates the last 64 channels of a head's result back
SPARSE_HEAD_DIMS = (HEAD_DIM, HEAD_DIM_V)
# Narrow keys (sparse_mla_narrow_sm90.py): (channels of a key, channels of a value), and warps per CTA
NARROW_DIMS, NARROW_WARPS = ((160, 128),), (4, 8)
FP8_KV_BYTES = {HEAD_DIM: 656, HEAD_DIM_V: 584}  # bytes of a key and its scales in an FP8 cache, by head dim

TILE_N = 64  # keys per tile; a mainloop computes one tile per step
TILE_M = 64  # rows (query tokens x heads) per CTA without swap A/B
SWAP_AB_HEADS = (16, 32)  # heads per CTA of the swap A/B kernel for 16-bit caches
FP8_KV_HEADS = (16, 32, 64)  # heads per CTA of the kernel for FP8 caches

PAGE_MULTIPLE = 16  # page sizes of a dense cache are multiples of this
MAX_BATCH = 32768  # largest number of sequences of a plan
PLAN_COLUMNS, PLAN_NUMBERS = 8, 6  # a plan has 8 columns, as in FlashMLA; the first 6 are used, the others are 0
MAX_PARTS = 160  # largest number of parts of a plan; a sequence has at most as many splits
# In batch-invariant dense decoding the splits of a sequence depend only on the sequence's length. All splits but the
# last have the same number of tiles, which is at least FIXED_SPLIT_TILES. A sequence has at most MAX_FIXED_SPLITS
# splits.
FIXED_SPLIT_TILES, MAX_FIXED_SPLITS = 64, 32

MERGE_DTYPES = (*DTYPES, "float32")
MAX_BRANCHES = 4
MERGE_CHANNEL_MULTIPLE = 8
MAX_MERGE_ROWS = 2**31 - 8

# Sliding windows (window_indices_sm90.py): the largest number of queries, of columns (keys of a window), and of keys
# per page. A loop index that is one step past this limit still fits in int32.
MAX_WINDOW = 2**30

# Multi-head attention
MHA_DIMS = (64, 64), (128, 128), (192, 128), (256, 256)  # supported (channels of q and k, channels of v) of a head
ROPE_DIMS = {(192, 128): 64, (256, 256): 64}  # rope channels of a key, if all heads share them in a separate tensor
# Bits of selected keys (selection_bits_sm90.py): keys per block, and 32-bit words that a query has per block
SELECTION_KEYS, SELECTION_WORDS = 128, 4

# Groups of queries that share keys, for models with few heads (selection_union_sm90.py)
# {largest number of heads: queries per group}. A group has at most TILE_M rows (queries x heads).
GROUP_SIZES = {8: 8, 16: 4}
MEMBER_SHIFT = 24  # entry of a group's list: bits 0 to 23 are a key, bit 24 + m says whether query m selected the key
# A group is computed together only if union <= MOST_UNION[0] / MOST_UNION[1] * total. `total` is the number of keys
# that the group's queries selected; `union` counts a key once, also if several queries selected it. The fraction is
# below 1 because a tile of a group takes 1.3 times as long as a tile of a single query (2806 and 2140 cycles).
MOST_UNION = (7, 10)

# The products with kv_b in FP8
ABSORBED_NOPE = (128, 192)  # supported numbers of non-rope channels of a head's q: V3.2, GLM-5
UP_PROJECTION_ROWS = 32  # the number of kv_b's rows per head is a multiple of this
MAX_UP_PROJECTION_ROWS = 2**22 - 1  # largest number of rows of kv_b, so that offsets in kv_b fit in int32
VALUE_GROUP = 128  # adjacent channels of a head's FP8 values that share a scale
