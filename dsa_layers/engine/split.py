"""A model on the meta device becomes a rank's part of it: parameters and counts of its own size."""

import os
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from dsa_layers.engine.cuts import Cut, cuts_of
from dsa_layers.engine.fused_block import FusedDecoderBlock
from dsa_layers.engine.fused_hyper_block import FusedHyperBlock
from dsa_layers.engine.shares import shares_of
from dsa_layers.engine.vocabulary import SplitEmbedding
from dsa_layers.layers.linear import Embedding
from dsa_layers.parallel.compare import compare_picks
from dsa_layers.parallel.ranks import Ranks


def split(model: nn.Module, ranks: Ranks, *, blocks: bool) -> dict[str, Cut]:
    """Turns a fused model, on the meta device and whole, into this rank's part. Returns what was cut and how.
    blocks: as of `cuts_of`.

    Attention and MLPs add parts of sums over the ranks (`Rows`), and the head joins the ranks' columns of logits.
    Layers that each rank has whole are not cut. So activations between layers have the same bits on every rank that
    has them, and so have the selected keys. With DSA_COMPARE_RANKS=1 in the environment, ranks check this in every pass
    that is not a replay of a CUDA graph: they all have all rows then (`compare_picks`).
    Raises ValueError, with the model unchanged, for one that does not come apart evenly.
    """
    cuts = cuts_of(model, ranks.size, blocks=blocks)
    if ranks.size == 1:
        return {}
    shared = [*shares_of(model, ranks.size)]
    for name, cut in cuts.items():
        owner, _, attribute = name.rpartition(".")
        module, whole = model.get_submodule(owner), model.get_parameter(name)
        part = torch.empty(cut.shape, dtype=whole.dtype, device=whole.device)
        setattr(module, attribute, nn.Parameter(part, requires_grad=whole.requires_grad))
    for _, module, shares in shared:
        if shares.whole:
            module.part_of_ranks = ranks
            continue
        for attribute in shares.counts:
            setattr(module, attribute, getattr(module, attribute) // ranks.size)
        if hasattr(module, "first"):
            module.first = ranks.rank * module.count
        if type(module) is Embedding:
            module.__class__ = SplitEmbedding
    if os.environ.get("DSA_COMPARE_RANKS") == "1" and dist.is_initialized():  # else nobody is there to ask
        compare_picks(model, ranks)
        ranks = replace(ranks, shares_rows=False)
    model.ranks = ranks  # for the engine
    for module in model.modules():
        if hasattr(module, "ranks"):
            module.ranks = ranks
        if isinstance(module, nn.ModuleList) and module and isinstance(module[0], FusedDecoderBlock | FusedHyperBlock):
            module[0].is_first = True
            module[-1].is_last = isinstance(module[-1], FusedDecoderBlock)  # `SplitDeepseekV4` gathers one stream
        elif isinstance(block := getattr(module, "block", None), FusedDecoderBlock | FusedHyperBlock):
            block.is_first = block.is_last = True
    return cuts
