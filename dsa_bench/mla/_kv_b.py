"""FP8 weights kv_b of several layers. Calls use the layers in turn, so that no call finds its weights in the L2 cache.
With 16 heads, however, the weights of all layers fit into the cache."""

import torch

import dsa
from dsa_bench.harness.case import Scaled, f32

LATENT = 512
_LAYERS = 8


def layers(heads: int, rows: int, part: slice) -> tuple[list[Scaled], list[torch.Tensor]]:
    """Return ([(e4m3 matrix [heads * rows, LATENT], scales) per layer], [bf16 tensor [heads, rows of `part`, LATENT]
    per layer]). The tensors are parts of the dequantised matrices. part: slice of each head's rows."""
    weights = [dsa.per_block_cast_to_fp8(f32(heads * rows, LATENT) * LATENT**-0.5) for _ in range(_LAYERS)]
    values = [dsa.dequantize_per_block(*w, torch.bfloat16).unflatten(0, (heads, rows))[:, part] for w in weights]
    return weights, values
