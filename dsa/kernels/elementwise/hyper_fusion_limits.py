"""What hyper-connections take together with what is beside them; free of CUTLASS, so that ops can check without it."""

# Collapse with norm and cast, of bf16: threads of the collapse by itself, and lanes and vectors of the norm by itself,
# from the shortest rows to the longest.
HYPER_NORM_TILES = ((128, 32, 2), (128, 32, 4), (128, 64, 4), (256, 128, 4), (512, 256, 4))
EXPAND_MIX_TOKENS = (1, 2, 4)  # at most so many, of the kernels that expand streams and project them
MAX_EXPAND_MIX_OUTPUTS = 2 * 65535  # of these kernels: a cluster has two
