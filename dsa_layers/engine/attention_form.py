"""The choice between the multi-head and the absorbed form of sparse attention in a prefill.

Both forms give the same result up to rounding. The multi-head form expands the latents to keys and values per head and
attends to all visible tokens under a mask. The absorbed form attends only to the latents of the selected keys, at most
top_k per query; all heads share these latents. In DeepSeek-V3.2, the multi-head form needs 320 multiply-adds per query,
key and head, and the absorbed form 1088. But the multi-head form scores more keys, and also expands the latents of
earlier tokens. So the multi-head form is faster for prefills with many new tokens and at most a few times top_k keys.

If each rank has fewer heads than TILE_OF_HEADS (split.py), the ranks split a long prefill by heads in the multi-head
form and by queries in the absorbed form. With the split by heads, the ranks must also exchange query latents, selected
indices and results (`Communication`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import dsa.runtime.backends
from dsa_layers.engine.fp32_product import has_any_rows
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear

# Multiply-adds per microsecond, measured on an H200. MULTI_HEAD: masked multi-head attention. ABSORBED: absorbed
# attention. EXPANDING: the FP8 products that expand latents to keys and values. ABSORBING: the 16-bit products with
# kv_b's weights in the absorbed form.
MULTI_HEAD, ABSORBED, EXPANDING, ABSORBING = 285e6, 300e6, 600e6, 330e6
# Measured on two H200s with NVLink. LATENCY: microseconds of a collective with little data. BANDWIDTH: bytes that a
# rank receives per microsecond; the time includes the copies before and after the collective.
LATENCY, BANDWIDTH = 20.0, 210e3
EXPANDED_BYTES = 2 << 30  # limit in bytes for the expanded 16-bit keys and values of a rank's heads


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of an attention layer.

    heads   the number of heads
    nope    channels of a head's key that rope does not rotate
    rope    channels of a head's key that rope rotates
    value   channels of a head's value
    latent  channels of a latent
    """

    heads: int
    nope: int
    rope: int
    value: int
    latent: int


@dataclass(frozen=True)
class Communication:
    """The data that ranks exchange in the multi-head form but not in the absorbed form.

    processes    the number of ranks
    token_bytes  bytes per new token: its query latents, the indices of its selected keys, and its result. On average a
                 rank receives (processes - 1) / processes of these bytes
    collectives  the number of collectives per layer for these data
    """

    processes: int
    token_bytes: int
    collectives: int

    def microseconds(self, tokens: int) -> float:
        """Return the time of the exchange in a pass over `tokens` new tokens."""
        from_others = tokens * self.token_bytes * (self.processes - 1) / self.processes
        return self.collectives * LATENCY + from_others / BANDWIDTH


def multi_head_is_faster(
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    top_k: int,
    sizes: HeadSizes,
    communication: Communication | None = None,
) -> bool:
    """Estimate whether the multi-head form is faster. If the expanded keys and values exceed EXPANDED_BYTES, return
    False.

    query_lens     the number of new tokens of each sequence
    key_lens       the number of earlier and new tokens of each sequence
    top_k          the largest number of keys that a query selects
    sizes          the sizes of the layer, with the number of heads of one rank
    communication  the exchange of the multi-head form; None if both forms exchange the same data
    """
    if 2 * sum(key_lens) * sizes.heads * (sizes.nope + sizes.value) > EXPANDED_BYTES:
        return False
    visible = sum(map(visible_keys, query_lens, key_lens))
    selected = visible - sum(_beyond(new, total, top_k) for new, total in zip(query_lens, key_lens))
    projected = sizes.heads * (sizes.nope + sizes.value) * sizes.latent
    multi_head = visible * sizes.heads * (sizes.nope + sizes.rope + sizes.value) / MULTI_HEAD
    absorbed = selected * sizes.heads * (2 * sizes.latent + sizes.rope) / ABSORBED
    expanding, absorbing = sum(key_lens) * projected / EXPANDING, sum(query_lens) * projected / ABSORBING
    exchanging = 0.0 if communication is None else communication.microseconds(sum(query_lens))
    return multi_head + expanding + exchanging < absorbed + absorbing


def visible_keys(new: int, total: int) -> int:
    """Return the number of (query, visible key) pairs if the last `new` of `total` tokens are the queries."""
    return new * (total - new) + new * (new + 1) // 2


def _beyond(new: int, total: int, top_k: int) -> int:
    """Return the number of pairs that `visible_keys` counts but that are not selected.

    The query at position p sees p + 1 keys, so the selection leaves out max(p + 1 - top_k, 0) of them.
    """
    last = max(total - top_k, 0)
    first = max(total - new - top_k, 0)
    return last * (last + 1) // 2 - first * (first + 1) // 2


# The kernels of `dsa.mla_absorb_queries` and `dsa.mla_values_cast_to_fp8` read kv_b in FP8. A decoding pass uses them
# for at most MOST_TOKENS tokens, or for any number if the pass is batch-invariant. The kernels support only heads with
# these NOPE and ROPE channels, LATENT latent channels, and a multiple of ROWS rows in kv_b.
MOST_TOKENS = 16
NOPE, ROPE, LATENT, ROWS = (128, 192), 64, 512, 32


def stored_up_projection(layer: DSAAttention, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return (weight, scales) of kv_b if this decoding pass uses the kernels that read kv_b in FP8, else None.

    q [T, heads, nope + rope]: the queries of the pass. Batch-invariant decoding uses the kernels for any T, other
    decoding for T up to MOST_TOKENS. The kernels require bf16 queries.
    """
    few = len(q) <= MOST_TOKENS or has_any_rows()
    if q.dtype != torch.bfloat16 or not few or not has_kernels(q) or not can_stay_stored(layer):
        return None
    return layer.kv_b_proj.weight, layer.kv_b_proj.weight_scale_inv


def can_stay_stored(layer: DSAAttention) -> bool:
    """Return whether the kernels that read kv_b in FP8, as the checkpoint stores it, support this layer."""
    kv_b = layer.kv_b_proj
    if any(type(linear) is not BlockFP8Linear for linear in (kv_b, layer.o_proj)):
        return False
    if layer.gate is not None:
        return False
    # A rank's part of kv_b must begin and end at a multiple of 128 rows, because 128 x 128 weights share a scale.
    if kv_b.part_of is not None and len(kv_b.weight) % BLOCK:
        return False
    taken = layer.nope_dim in NOPE and layer.rope_dim == ROPE and layer.kv_lora_rank == LATENT
    return taken and layer.v_dim % BLOCK == 0 and (layer.nope_dim + layer.v_dim) % ROWS == 0


def has_kernels(x: torch.Tensor) -> bool:
    return dsa.runtime.backends.runs_kernel("mla_absorb_queries", x)
