"""Limits of the fused hyper-connection kernels. Free of CUTLASS, so that ops can check them without it."""

# Collapse, norm and cast, bf16: (threads of the separate collapse kernel, threads per row and vectors per thread of the
# separate norm kernel), from the shortest rows to the longest.
HYPER_NORM_TILES = ((128, 32, 2), (128, 32, 4), (128, 64, 4), (256, 128, 4), (512, 256, 4))
EXPAND_MIX_TOKENS = (1, 2, 4)  # the most tokens of each kernel that expands streams and projects them
MAX_EXPAND_MIX_OUTPUTS = 2 * 65535  # two per cluster, and a grid has at most 65535 in y
