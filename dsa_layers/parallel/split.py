"""A model on the meta device becomes a rank's part of it: parameters of its own size, and sums over the ranks."""

import os
from functools import partial
from typing import Any

import torch
from torch import nn

import dsa
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.experts import Experts
from dsa_layers.layers.moe import MoE, SwiGLU
from dsa_layers.parallel.compare import compare_picks
from dsa_layers.parallel.cuts import Cut, cuts_of
from dsa_layers.parallel.ranks import Ranks


def split(model: nn.Module, ranks: Ranks, *, blocks: bool) -> dict[str, Cut]:
    """Turns the model, on the meta device and whole, into this rank's part. Returns what was cut and how;
    blocks: as of `cuts_of`.

    Attention and MLPs give the sum over the ranks' parts, embeddings that of rows of which all ranks but one have none,
    the model the ranks' columns of logits beside each other. So activations between layers are whole, and their bits
    the same on every rank: all compute the same index scores and select the same keys. With DSA_COMPARE_RANKS=1 in the
    environment passes make sure of that, but for those that a CUDA graph replays (`compare_picks`).
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
    for module in [*model.modules()]:
        _become_part(module, ranks)
    model.register_forward_hook(partial(_join_logits, ranks))
    if os.environ.get("DSA_COMPARE_RANKS") == "1":
        compare_picks(model, ranks)
    return cuts


def _become_part(module: nn.Module, ranks: Ranks) -> None:
    if isinstance(module, DSAAttention | CompressedAttention):
        module.n_heads //= ranks.size
    if isinstance(module, CompressedAttention):
        module.o_groups //= ranks.size
        module.wo_a.groups //= ranks.size
    if isinstance(module, Experts):
        module.__class__, module.first = _PartOfExperts, ranks.rank * len(module.down_proj)
    if isinstance(module, DSAAttention | CompressedAttention | MoE):
        module.register_forward_hook(partial(_sum, ranks))
    for name, child in module.named_children():
        if isinstance(child, nn.Embedding):
            setattr(module, name, _PartOfEmbedding(child.weight, ranks))
        # The shared expert's output is added to the routed ones' before their sum.
        elif isinstance(child, SwiGLU) and not isinstance(module, MoE):
            child.register_forward_hook(partial(_sum, ranks))


def _sum(ranks: Ranks, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return ranks.sum(output)


def _join_logits(ranks: Ranks, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return ranks.join_columns(output)


class _PartOfExperts(Experts):
    """The sum over a token's experts of this rank, which are `first` and those behind it."""

    first: int

    def forward(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        order, rows, ends = dsa.sort_by_expert(experts - self.first, len(self.down_proj))
        # The rows of other ranks' experts come last. Products take no row without an expert, so these are the last
        # one's; what it makes of them nobody reads.
        ends[-1:] = len(order)
        if self.fp8:
            outputs = self._quantised_outputs(x, rows, ends)
        else:
            outputs = self._float_outputs(x, order // experts.shape[1], ends)
        return dsa.combine_experts(outputs, rows, weights, shared, residual)


class _PartOfEmbedding(nn.Module):
    """y = weight[tokens], of whose rows each rank has some. tokens int64 [...] -> [..., hidden]."""

    def __init__(self, weight: nn.Parameter, ranks: Ranks) -> None:
        super().__init__()
        self.weight, self._ranks = weight, ranks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = tokens - self._ranks.rank * len(self.weight)
        own = (rows >= 0) & (rows < len(self.weight))
        y = nn.functional.embedding(rows.clamp(0, len(self.weight) - 1), self.weight)
        return self._ranks.sum(y.masked_fill(~own[..., None], 0))
