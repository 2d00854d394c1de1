"""The merge of the results of attention to disjoint sets of keys."""

from collections.abc import Sequence

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.mla.softmax_attention import apply_sink


@without_autocast
def merge_attention(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], attn_sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = sum_i e^(lse_i - lse) out_i with lse = log sum_i e^lse_i: attention over the union of disjoint key sets.

    An lse_i of +inf or -inf marks a set without keys, whose out_i is ignored. Where no set has keys, out is 0 and lse
    +inf. Intermediate results are fp32. Arguments as in `dsa.merge_attention`.
    Source: DeepSeek-V4 (arXiv 2606.19348), one softmax over window and compressed keys.
    """
    branches = torch.stack([*lses])
    empty = branches.isinf()
    branches = branches.masked_fill(empty, -torch.inf)
    lse = branches.logsumexp(0)
    nothing = empty.all(0)
    weights = (branches - lse.masked_fill(nothing, 0.0)).exp()
    values = torch.stack([out.float() for out in outs]).masked_fill(empty.unsqueeze(-1), 0.0)
    merged, lse = (weights.unsqueeze(-1) * values).sum(0), lse.masked_fill(nothing, torch.inf)
    if attn_sink is not None:
        merged = apply_sink(merged, lse, attn_sink)
    return merged.to(outs[0].dtype), lse
