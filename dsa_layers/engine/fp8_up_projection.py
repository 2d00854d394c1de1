"""Decoding with W_UK and W_UV in FP8, as the checkpoint stores them in kv_b.

With few tokens most of the time goes into reading the weights, and FP8 weights take half the bytes of bf16. The same
kernels apply rope to the queries and cast the values for o_proj, and no dequantised copy is kept. A token's results do
not depend on other tokens, so batch-invariant passes use these ops for any number of tokens.
"""

import torch

import dsa.runtime.backends
from dsa_layers.engine.batch_invariance import has_any_rows
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear

MOST_TOKENS = 16  # with 32 tokens, bf16 products by head are as fast
NOPE, ROPE, LATENT, ROWS = (128, 192), 64, 512, 32  # sizes that the kernels take; a head's rows are a multiple of ROWS


def stored_up_projection(layer: DSAAttention, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """kv_b's weight and scales if a pass with queries q [T, heads, nope + rope] multiplies with them and casts the
    values for o_proj: few tokens in bf16, on a GPU with the kernels. Else None."""
    few = len(q) <= MOST_TOKENS or has_any_rows()
    if q.dtype != torch.bfloat16 or not few or not has_kernels(q) or not can_stay_stored(layer):
        return None
    return layer.kv_b_proj.weight, layer.kv_b_proj.weight_scale_inv


def can_stay_stored(layer: DSAAttention) -> bool:
    """Whether the kernels can read this layer's kv_b as it is stored."""
    kv_b = layer.kv_b_proj
    if any(type(linear) is not BlockFP8Linear for linear in (kv_b, layer.o_proj)):
        return False
    # A part of the heads must begin and end at whole blocks, which share a scale.
    if kv_b.part_of is not None and len(kv_b.weight) % BLOCK:
        return False
    taken = layer.nope_dim in NOPE and layer.rope_dim == ROPE and layer.kv_lora_rank == LATENT
    return taken and layer.v_dim % BLOCK == 0 and (layer.nope_dim + layer.v_dim) % ROWS == 0


def has_kernels(x: torch.Tensor) -> bool:
    return dsa.runtime.backends.runs_kernel("mla_absorb_queries", x)
