"""Limits of the kernels of `route_to_experts`, as plain numbers and names of torch dtypes, for kernels, ops and tests.
The limits of top_k and n_group are those of the gate's kernel."""

DTYPES = ("bfloat16", "float16")
CHANNEL_MULTIPLE = 32
# Tokens per tile of logits. One CTA sorts up to FEW_TOKENS tokens; a cluster sorts more.
FEW_TOKENS, TILE_TOKENS = 8, 32
# Separate kernels for product, gate and sort are slower for 64 tokens, and faster for 128.
MAX_TOKENS, MAX_EXPERTS = 64, 512
