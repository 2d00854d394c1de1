"""What the kernels of mixtures of experts take, in plain numbers and names of torch dtypes; read by kernels, bridges
and tests."""

# The gate.
MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS = 1024, 32, 32

# The sort: the numbers of entries up to a round of loads behind the last one, and of CTAs, are int32.
MAX_SORT_ENTRIES, MAX_SORT_EXPERTS = 2**31 - 2**9, 2**31 - 2

# The combination of the experts' results.
COMBINE_DTYPES = ("bfloat16", "float16", "float32")
CHANNEL_MULTIPLE = 8
COMBINE_CTA_BYTES = 2048  # of a token's channels, a CTA
MAX_COMBINE_ROWS = 2**31 - 1  # of the experts' results, and CTAs
