"""What the kernels of `route_to_experts` take, in plain numbers; read by kernels, bridge, layers and tests. Experts,
top_k and groups are as of the gate."""

DTYPES = ("bfloat16", "float16")
CHANNEL_MULTIPLE = 32
# Tokens of a tile of logits: all that there are if these are few, which one CTA then sorts; else a cluster does.
FEW_TOKENS, TILE_TOKENS = 8, 32
MAX_TOKENS = 128
