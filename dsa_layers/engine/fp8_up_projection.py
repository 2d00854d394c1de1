"""Decoding with W_UK and W_UV as an FP8 checkpoint stores them, by the ops that multiply with a part of kv_b.

Few tokens wait for the weights' bytes, of which FP8 has half; rope of the queries and the cast in front of o_proj are
in the same kernels; and nothing that is dequantised has to be kept. A token's results depend on no other token, so that
batch-invariant passes have it for any number of them.
"""

import torch

import dsa.runtime.backends
from dsa_layers.engine.batch_invariance import has_any_rows
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear

MOST_TOKENS = 16  # with twice as many, bf16 products by head take as long
NOPE, ROPE, LATENT, ROWS = (128, 192), 64, 512, 32  # what the kernels take; ROWS: of a head, a multiple of it


def stored_up_projection(layer: DSAAttention, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """kv_b's weight and scales, if a pass with queries like q [T, heads, nope + rope] multiplies with these and gives
    o_proj a cast of the values: few tokens in bf16, on a GPU with kernels for it. Else None."""
    few = len(q) <= MOST_TOKENS or has_any_rows()
    if q.dtype != torch.bfloat16 or not few or not has_kernels(q) or not can_stay_stored(layer):
        return None
    return layer.kv_b_proj.weight, layer.kv_b_proj.weight_scale_inv


def can_stay_stored(layer: DSAAttention) -> bool:
    """Whether a layer is one whose kv_b the kernels read as it is stored."""
    kv_b = layer.kv_b_proj
    if any(type(linear) is not BlockFP8Linear for linear in (kv_b, layer.o_proj)):
        return False
    # The scales of a part of the heads are whole blocks' where its rows are.
    if kv_b.part_of is not None and len(kv_b.weight) % BLOCK:
        return False
    taken = layer.nope_dim in NOPE and layer.rope_dim == ROPE and layer.kv_lora_rank == LATENT
    return taken and layer.v_dim % BLOCK == 0 and (layer.nope_dim + layer.v_dim) % ROWS == 0


def has_kernels(x: torch.Tensor) -> bool:
    return dsa.runtime.backends.runs_kernel("mla_absorb_queries", x)
