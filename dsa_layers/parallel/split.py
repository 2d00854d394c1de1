"""A model on the meta device becomes a rank's part of it: parameters and counts of its own size."""

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from dsa_layers.layers.own_part import OwnPart
from dsa_layers.layers.shares import splits_tokens
from dsa_layers.parallel.compare import compare_picks
from dsa_layers.parallel.cuts import Cut, cuts_of, shares_of
from dsa_layers.parallel.ranks import Ranks


def split(model: nn.Module, ranks: Ranks, *, blocks: bool) -> dict[str, Cut]:
    """Turns the model, on the meta device and whole, into this rank's part. Returns what was cut and how;
    blocks: as of `cuts_of`.

    Attention and MLPs add parts of sums over the ranks (`Rows`), and the model sets the ranks' columns of logits beside
    each other; layers in whose place long passes split the tokens (`splits_tokens`) are whole. So activations between
    layers have the same bits on every rank that has them, and so have the picks. With DSA_COMPARE_RANKS=1 in the
    environment passes make sure of that, but for those that a CUDA graph replays: all ranks then have all rows, select
    for all, and compare (`compare_picks`).
    Raises ValueError, with the model unchanged, for one that does not come apart evenly.
    """
    cuts = cuts_of(model, ranks.size, blocks=blocks)
    if ranks.size == 1:
        return {}
    for name, cut in cuts.items():
        owner, _, attribute = name.rpartition(".")
        module, whole = model.get_submodule(owner), model.get_parameter(name)
        part = torch.empty(cut.shape, dtype=whole.dtype, device=whole.device)
        setattr(module, attribute, nn.Parameter(part, requires_grad=whole.requires_grad))
    for _, module, shares in shares_of(model):
        if splits_tokens(module, ranks.size):
            module.own_part = OwnPart(ranks.rank, ranks.size)
            continue
        for attribute in shares.counts:
            setattr(module, attribute, getattr(module, attribute) // ranks.size)
        if hasattr(module, "first"):
            module.first = ranks.rank * module.count
    if os.environ.get("DSA_COMPARE_RANKS") == "1" and dist.is_initialized():  # else nobody is there to ask
        compare_picks(model, ranks)
        ranks = replace(ranks, shares_rows=False)
    for module in model.modules():
        if hasattr(module, "ranks"):
            module.ranks = ranks
    return cuts


def copy_own_parts(model: nn.Module) -> None:
    """Makes what a rank has beside the weights of layers that it has whole (`OwnPart`), once these are loaded: in a
    short pass it would be made, too, but not in a CUDA graph's. To be called again after a change of weights that
    PyTorch does not count, through `.data` or from outside; graphs then read the new numbers."""
    for _, layer, _ in shares_of(model):
        if getattr(layer, "own_part", None) is not None:
            layer.own_part.update(layer)
