"""Attention to all earlier tokens of a sequence, in PyTorch."""

import torch
from torch import nn

from dsa_layers.batch.token_batch import TokenBatch


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: TokenBatch,
    softmax_scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute o_t = sum_s softmax_s(softmax_scale * q_t . k_s) v_s per head, where s runs over the keys of token t's
    sequence up to t. With sinks, fp32 [heads], the softmax denominator of head h has one more term, e^{sinks[h]}.

    q [T, heads, D], k [sum(key_lens), heads, D], v [sum(key_lens), heads, V] -> [T, heads, V], differentiable.
    """
    if sinks is None and q.requires_grad and len({*batch.query_lens, *batch.key_lens}) == 1:
        # In training, one call without a mask computes all sequences if they have equal lengths and no earlier tokens.
        by_sequence = (x.unflatten(0, (len(batch.query_lens), -1)).transpose(1, 2) for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(*by_sequence, is_causal=True, scale=softmax_scale)
        return out.transpose(1, 2).flatten(0, 1)
    out = []
    for q_i, k_i, v_i in zip(q.split(batch.query_lens), k.split(batch.key_lens), v.split(batch.key_lens)):
        new, total = len(q_i), len(k_i)
        visible = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        if sinks is None:
            by_head = (x.transpose(0, 1)[None] for x in (q_i, k_i, v_i))
            attended = nn.functional.scaled_dot_product_attention(*by_head, attn_mask=visible, scale=softmax_scale)
            out.append(attended[0].transpose(0, 1))
        else:
            logits = softmax_scale * torch.einsum("thd,shd->hts", q_i.float(), k_i.float())
            logits = logits.masked_fill(~visible, -torch.inf)
            logits = torch.cat((logits, sinks[:, None, None].expand(-1, new, -1)), -1)
            out.append(torch.einsum("hts,shv->thv", logits.softmax(-1)[..., :-1], v_i.float()).to(v.dtype))
    return torch.cat(out) if out else v[:0]
