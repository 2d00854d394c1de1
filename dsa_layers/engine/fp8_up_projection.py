"""Decoding with W_UK and W_UV in FP8, as the checkpoint stores them in kv_b.

With few tokens, reading the weights takes most of the time, and FP8 weights have half the bytes of bf16 weights. The
same kernels apply rope to the queries and cast the values for o_proj, and the layer keeps no dequantised copy of the
weights. A token's results do not depend on other tokens, so batch-invariant decoding passes use these ops for any
number of tokens.
"""

import torch

import dsa.runtime.backends
from dsa_layers.engine.batch_invariance import has_any_rows
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear

MOST_TOKENS = 16  # with 32 tokens, one bf16 product per head is as fast as these kernels
NOPE, ROPE, LATENT, ROWS = (128, 192), 64, 512, 32  # supported sizes; a head's rows are a multiple of ROWS


def stored_up_projection(layer: DSAAttention, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the FP8 weight and the scales of kv_b if the kernels can use them for this pass, else None.

    q [T, heads, nope + rope]: the queries of the pass. The kernels need few tokens or a batch-invariant decoding pass,
    bf16 queries, a layer that `can_stay_stored` accepts, and a GPU that has the kernels.
    """
    few = len(q) <= MOST_TOKENS or has_any_rows()
    if q.dtype != torch.bfloat16 or not few or not has_kernels(q) or not can_stay_stored(layer):
        return None
    return layer.kv_b_proj.weight, layer.kv_b_proj.weight_scale_inv


def can_stay_stored(layer: DSAAttention) -> bool:
    """Return whether the kernels can read this layer's kv_b in FP8, as the checkpoint stores it."""
    kv_b = layer.kv_b_proj
    if any(type(linear) is not BlockFP8Linear for linear in (kv_b, layer.o_proj)):
        return False
    # 128 x 128 weights share a scale, so a rank's heads must begin and end at a multiple of 128 rows.
    if kv_b.part_of is not None and len(kv_b.weight) % BLOCK:
        return False
    taken = layer.nope_dim in NOPE and layer.rope_dim == ROPE and layer.kv_lora_rank == LATENT
    return taken and layer.v_dim % BLOCK == 0 and (layer.nope_dim + layer.v_dim) % ROWS == 0


def has_kernels(x: torch.Tensor) -> bool:
    return dsa.runtime.backends.runs_kernel("mla_absorb_queries", x)
