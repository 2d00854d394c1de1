"""The merge of attention branches with disjoint keys."""

from collections.abc import Sequence

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.mla.softmax_attention import apply_sink
from dsa.runtime.arguments import F32, ROWS, Arguments, Tensor, Tensors
from dsa.runtime.checks import FLOATS, check_memory

MERGE_ATTENTION = Arguments(
    outs=Tensors("... H d_v", FLOATS, count="branches", layout=ROWS, merged=(0, -3)),
    lses=Tensors("... H", F32, count="branches", merged=(0, -2)),
    attn_sink=Tensor("H", F32, optional=True),
)


@without_autocast
def merge_attention(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], attn_sink: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out = sum_i e^(lse_i - lse) out_i with lse = log sum_i e^lse_i: attention over the union of disjoint key sets.

    Everything is fp32 in between. Where every branch is empty, out is 0 and lse +inf.
    Arguments as of `dsa.merge_attention`.
    Source: DeepSeek-V4 (arXiv 2606.19348), one softmax over window and compressed keys.
    """
    outs, lses = list_of(outs), list_of(lses)
    MERGE_ATTENTION.check(outs, lses, attn_sink)
    check_memory("outs[0]", outs[0])
    branches = torch.stack(lses)
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


def list_of(branches: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Branches in a list, if they are in a tuple or stacked in a tensor; what is neither, as it is."""
    if isinstance(branches, torch.Tensor) and branches.layout is torch.strided and not branches.is_nested:
        return list(branches.unbind()) if branches.dim() else branches
    return list(branches) if isinstance(branches, tuple) else branches
