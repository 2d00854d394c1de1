"""What the kernels of `route_to_experts` take, in plain numbers and names of torch dtypes; read by kernels, bridge and
tests. top_k and n_group are as of the gate's kernel."""

DTYPES = ("bfloat16", "float16")
CHANNEL_MULTIPLE = 32
# Tokens of a tile of logits: all that there are if these are few, which one CTA then sorts; else a cluster does.
FEW_TOKENS, TILE_TOKENS = 8, 32
# Product, gate and sort by themselves take longer for 64 tokens, and less for 128.
MAX_TOKENS, MAX_EXPERTS = 64, 512
