"""The FP8 weights kv_b of several layers, which calls use in turn so that they do not find them in the L2 cache."""

import torch

import dsa
from dsa_bench.harness.case import Scaled, f32

LATENT = 512
_LAYERS = 8


def layers(heads: int, rows: int, part: slice) -> tuple[list[Scaled], list[torch.Tensor]]:
    """Return (FP8 matrices [heads * rows, LATENT] with scales, bf16 values [heads, rows of part, LATENT]), a list per
    layer. part: slice of each head's rows."""
    weights = [dsa.per_block_cast_to_fp8(f32(heads * rows, LATENT) * LATENT**-0.5) for _ in range(_LAYERS)]
    values = [dsa.dequantize_per_block(*w, torch.bfloat16).unflatten(0, (heads, rows))[:, part] for w in weights]
    return weights, values
