"""Limits of the kernels of mixtures of experts, as plain numbers and names of torch dtypes, for kernels, ops and
tests."""

MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS = 1024, 32, 32

# The sort. Entry indices are int32, and can exceed the number of entries by 256, a round of loads. There are experts +
# 1 CTAs.
MAX_SORT_ENTRIES, MAX_SORT_EXPERTS = 2**31 - 2**9, 2**31 - 2

COMBINE_DTYPES = ("bfloat16", "float16", "float32")
CHANNEL_MULTIPLE = 8
COMBINE_CTA_BYTES = 2048  # bytes of a token's channels per CTA
MAX_COMBINE_ROWS = 2**31 - 1  # limit on the rows of the experts' results, and on the CTAs
