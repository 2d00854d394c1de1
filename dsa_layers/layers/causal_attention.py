"""Causal attention of packed sequences, computed by PyTorch's scaled_dot_product_attention."""

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: TokenBatch, softmax_scale: float
) -> torch.Tensor:
    """Compute o_t = sum_s softmax_s(softmax_scale * q_t . k_s) v_s per head. s runs over the keys of token t's sequence
    that token t sees.

    q [T, heads, D], k [sum(key_lens), heads, D], v [sum(key_lens), heads, V] -> [T, heads, V], differentiable.
    """
    if q.requires_grad and len({*batch.query_lens, *batch.key_lens}) == 1:
        # Sequences of equal length need no mask, so one call of flash attention computes all of them.
        by_sequence = (x.unflatten(0, (len(batch.query_lens), -1)).transpose(1, 2) for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(*by_sequence, is_causal=True, scale=softmax_scale)
        return out.transpose(1, 2).flatten(0, 1)
    out = []
    for q_i, k_i, v_i in zip(q.split(batch.query_lens), k.split(batch.key_lens), v.split(batch.key_lens)):
        new, total = len(q_i), len(k_i)
        visible = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        by_head = (x.transpose(0, 1)[None] for x in (q_i, k_i, v_i))
        attended = nn.functional.scaled_dot_product_attention(*by_head, attn_mask=visible, scale=softmax_scale)
        out.append(attended[0].transpose(0, 1))
    return torch.cat(out) if out else v[:0]
