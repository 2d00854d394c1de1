"""Multi-head attention over packed sequences, over all keys or over selected keys."""

import itertools

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.mla.selection_bits import selected_keys

_CHUNK = 2**26  # elements of a tensor of scores: 256 MiB of fp32


@without_autocast
def mha_varlen_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = True,
    k_rope: torch.Tensor | None = None,
    selected: torch.Tensor | None = None,
    dense_keys: int = 0,
    attn_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[t, h] = sum_j softmax_j(softmax_scale * q[t, h] . k[j, h']) v[j, h'] over the keys j that query t sees.

    h' = h // (H / Hk). With `selected`, a query sees the keys whose bits are set; if it would see at most dense_keys
    keys without `selected`, it sees all of these. `attn_sink` scales out by e^lse / (e^lse + e^sink). Intermediate
    results are fp32. Arguments as in `dsa.mha_varlen_fwd`.
    Source: FlashAttention's `flash_attn_varlen_func`.
    """
    if k_rope is not None:
        k = torch.cat((k, k_rope[:, None].expand(-1, k.shape[1], -1)), -1)
    (rows, heads, _), (keys, kv_heads, value_dim) = q.shape, v.shape
    out = q.new_zeros(rows, heads, value_dim)
    lse = torch.full((heads, rows), torch.inf, dtype=torch.float32, device=q.device)
    of_queries, of_keys = (_spans(x, n) for x, n in ((cu_seqlens_q, rows), (cu_seqlens_k, keys)))
    for (begin, end), (first, last) in zip(of_queries, of_keys):
        count = last - first
        if count == 0:
            continue
        # Contiguous, because the rounding of a product on a CPU depends on strides.
        own_k, own_v = (
            x[first:last].float().repeat_interleave(heads // kv_heads, 1).transpose(0, 1).contiguous() for x in (k, v)
        )
        for part in range(begin, end, max(1, _CHUNK // (heads * count))):
            chunk = slice(part, min(part + max(1, _CHUNK // (heads * count)), end))
            visible = torch.ones(chunk.stop - part, count, dtype=torch.bool, device=q.device)
            if causal:
                visible = visible.tril(count - (end - part))
            if selected is not None:
                sees_few = visible.sum(1, keepdim=True) <= dense_keys
                visible &= selected_keys(selected[chunk], count) | sees_few
            own_q = q[chunk].float().transpose(0, 1).contiguous()
            logits = (own_q @ own_k.mT * softmax_scale).masked_fill(~visible, -torch.inf)
            own_lse = logits.logsumexp(-1)
            empty = own_lse == -torch.inf
            weights = (logits - own_lse.masked_fill(empty, 0.0)[..., None]).exp()
            if attn_sink is not None:
                weights = weights * (own_lse.masked_fill(empty, 0.0) - attn_sink[:, None]).sigmoid()[..., None]
            out[chunk] = (weights @ own_v).transpose(0, 1).to(q.dtype)
            lse[:, chunk] = own_lse.masked_fill(empty, torch.inf)
    return out, lse


def _spans(bounds: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """Return (first row, end) of each sequence; (0, 0) for wrong bounds."""
    pairs = itertools.pairwise(bounds.tolist())
    return [(first, end) if 0 <= first <= end <= rows else (0, 0) for first, end in pairs]
