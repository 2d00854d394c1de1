"""A check that all ranks select the same keys, for debugging: it waits for the GPU in every layer."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsa_layers.layers.selecting_attention import selecting_method
from dsa_layers.parallel.ranks import Ranks


def compare_picks(model: nn.Module, ranks: Ranks) -> None:
    """From now on every selection of the model's indexers is compared with the other ranks'. RuntimeError on all ranks
    that names the layer and the first token whose keys differ. While a CUDA graph is captured nothing is compared."""
    for name, module in model.named_modules():
        indexer = getattr(module, "indexer", None)
        if indexer is not None:
            selects = selecting_method(indexer)
            setattr(indexer, selects, _compared(getattr(indexer, selects), f"{name}.indexer", ranks))


def _compared(select: Callable[..., torch.Tensor | None], name: str, ranks: Ranks) -> Callable[..., Any]:
    @functools.wraps(select)
    def compared(*arguments: Any, **options: Any) -> torch.Tensor | None:
        picks = select(*arguments, **options)
        if picks is not None and not (picks.is_cuda and torch.cuda.is_current_stream_capturing()):
            _compare(picks, name, ranks)
        return picks

    return compared


def _compare(picks: torch.Tensor, name: str, ranks: Ranks) -> None:
    first = picks.contiguous().clone()
    dist.broadcast(first, group=ranks.group, group_src=0)
    # A row's number where it differs, or the number of rows.
    differs = (first != picks).flatten(1).any(1)
    rows = torch.arange(len(picks), device=picks.device).masked_fill(~differs, len(picks))
    row = rows.min() if len(rows) else rows.new_zeros(())
    dist.all_reduce(row, op=dist.ReduceOp.MIN, group=ranks.group)
    if row.item() < len(picks):
        raise RuntimeError(
            f"{name}: ranks have selected other keys for token {row.item()} of {len(picks)} in this pass"
        )
