"""DeepSeek-V4's hyper-connections between two sublayers: the new streams, and their projection."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.elementwise.hyper_connections import hyper_expand
from dsa.reference.elementwise.hyper_mix import BF16, check_sizes, hyper_mix
from dsa.runtime.arguments import ALIGNED, F32, ROWS, Arguments, Tensor
from dsa.runtime.checks import check_memory

HYPER_EXPAND_MIX = Arguments(
    rule=check_sizes,
    y=Tensor("T D", BF16, layout=ROWS),
    streams=Tensor("T n D", BF16, layout=ROWS),
    post=Tensor("T n", F32, layout=ALIGNED),
    comb=Tensor("T n n", F32, layout=ALIGNED),
    parts=Tensor("3 C n*D", BF16, layout=ALIGNED),
)


@without_autocast
def hyper_expand_mix(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, parts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(X', mix): X' = hyper_expand(y, streams, post, comb) and mix = hyper_mix(X', parts).

    Gradients flow to every tensor. Arguments as of `dsa.hyper_expand_mix`.
    """
    HYPER_EXPAND_MIX.check(y, streams, post, comb, parts)
    check_memory("streams", streams)
    new = hyper_expand(y, streams, post, comb)
    return new, hyper_mix(new, parts)
