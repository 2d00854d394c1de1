"""Limits of the kernels of `route_to_experts`, as plain numbers and names of torch dtypes, for kernels, ops and tests.
The limits of top_k and n_group are those of the gate's kernel: MAX_TOP_K and MAX_GROUPS in limits.py."""

DTYPES = ("bfloat16", "float16")
CHANNEL_MULTIPLE = 32
# Tokens per tile of the logits' product. One CTA gates and sorts up to FEW_TOKENS tokens; a cluster gates and sorts
# more.
FEW_TOKENS, TILE_TOKENS = 8, 32
# At 64 tokens these kernels are faster than separate kernels for product, gate and sort; at 128 tokens they are slower.
MAX_TOKENS, MAX_EXPERTS = 64, 512
