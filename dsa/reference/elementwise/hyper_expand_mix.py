"""Hyper-connections between two sublayers: the new residual streams and their projection."""

import torch

from dsa.reference.autocast import without_autocast
from dsa.reference.elementwise.hyper_connections import hyper_expand
from dsa.reference.elementwise.hyper_mix import hyper_mix


@without_autocast
def hyper_expand_mix(
    y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor | None, parts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (X', mix), where X' = hyper_expand(y, streams, post, comb) and mix = hyper_mix(X', parts).

    Gradients flow to every tensor. Arguments as in `dsa.hyper_expand_mix`.
    """
    new = hyper_expand(y, streams, post, comb)
    return new, hyper_mix(new, parts)
