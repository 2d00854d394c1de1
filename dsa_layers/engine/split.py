"""Tensor parallelism: conversion of a whole model on the meta device to the part of one rank.

`split` cuts parameters into equal parts, one per rank; rank r has part r. A linear layer that is cut along dimension 1
follows layers that are cut along dimension 0, and returns a partial sum of the result. `split` does not cut replicated
layers (`ShardingPlan`). After the weights are loaded, `make_parts` copies each replicated layer with only the rank's
part of the parameters.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn

import dsa
from dsa.kernels.moe.limits import CHANNEL_MULTIPLE, COMBINE_DTYPES
from dsa.runtime import backends
from dsa_layers.batch.token_batch import TokenBatch
from dsa_layers.cache.compressed_kv_cache import CompressedKVCache
from dsa_layers.engine.fused_blocks import FusedDecoderBlock, FusedHyperBlock
from dsa_layers.engine.joint_linear import join_layers
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.experts import Experts
from dsa_layers.layers.kimi_delta_attention import KimiDeltaAttention
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear, LanguageModelHead
from dsa_layers.layers.moe import SwiGLU
from dsa_layers.models.deepseek_v4 import DeepseekV4ForCausalLM
from dsa_layers.parallel.placement import placement_of
from dsa_layers.parallel.ranks import ALONE, Ranks

# The largest tile of the sparse attention kernels has 64 heads. Fewer heads save little: `dsa.flash_mla_sparse_fwd`
# takes 0.7 times as long with 16 heads as with 64 (4096 queries, 32768 keys, top-k 2048). So if each rank would have
# fewer than TILE_OF_HEADS heads, the ranks split the queries of long prefills instead of the heads, except in the
# multi-head form.
TILE_OF_HEADS = 64
SCALES = "_scale_inv"  # suffix of the names of FP8 weights' scales


@dataclass(frozen=True)
class ShardingPlan:
    """The rules by which ranks divide a layer.

    dim0, dim1  the parameters to cut along dimension 0 or 1. An item is the name of a parameter, the name of a
                submodule for all its parameters, or "" for all parameters of the layer
    counts      {attribute: the noun in error messages}, such as {"n_heads": "attention heads"}, for the attributes that
                `split` divides by the number of ranks
    unquantised  the parameters and submodules of dim0 that are never FP8
    blocks      whether a cut could go through a 128 x 128 block of FP8 weights. False for embedding and head, which are
                never FP8, and for experts, which `split` cuts between experts
    replicated  whether each rank has the whole layer. In long prefills (SHARDED_TOKENS in parallel/placement.py), a
                rank then computes the whole layer for its local rows. In all other passes, and for attention in the
                multi-head form, a rank computes its part (`rank_part`)
    """

    dim0: tuple[str, ...] = ()
    dim1: tuple[str, ...] = ()
    counts: Mapping[str, str] = field(default_factory=dict)
    unquantised: tuple[str, ...] = ()
    blocks: bool = True
    replicated: bool = False


PLANS: dict[type[nn.Module], ShardingPlan] = {
    DSAAttention: ShardingPlan(
        ("q_b_proj", "kv_b_proj", "gate_proj", "sinks", "softmax_scaling"),
        ("o_proj",),
        {"n_heads": "attention heads"},
        ("gate_proj",),
    ),
    CompressedAttention: ShardingPlan(
        ("wq_b", "attn_sink", "wo_a"),
        ("wo_b",),
        {"n_heads": "attention heads", "o_groups": "groups of attention heads"},
    ),
    KimiDeltaAttention: ShardingPlan(
        (
            *("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d"),
            *("f_b_proj", "g_b_proj", "b_proj", "A_log", "dt_bias"),
        ),
        ("o_proj",),
        {"n_heads": "heads of linear attention"},
        ("q_conv1d", "k_conv1d", "v_conv1d", "b_proj", "A_log", "dt_bias"),
    ),
    SwiGLU: ShardingPlan(("gate_proj", "up_proj"), ("down_proj",)),
    Experts: ShardingPlan(("",), counts={"count": "experts"}, blocks=False),
    nn.Embedding: ShardingPlan(("weight",), blocks=False),
    LanguageModelHead: ShardingPlan(("weight",), blocks=False),
}


@dataclass(frozen=True)
class Cut:
    """The cut of one parameter.

    dim    the dimension along which the parameter is cut
    whole  the shape of the whole parameter
    size   the size of a rank's part along `dim`
    """

    dim: int
    whole: tuple[int, ...]
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a rank's part."""
        return (*self.whole[: self.dim], self.size, *self.whole[self.dim + 1 :])

    def part(self, rank: int) -> tuple[slice, ...]:
        """Return the index that selects a rank's part in the whole parameter."""
        own = slice(rank * self.size, (rank + 1) * self.size)
        return (*(slice(0, n) for n in self.whole[: self.dim]), own)


class DoesNotDivide(ValueError):
    """Error for a model that cannot be cut into equal parts, one per rank.

    The message names the number of ranks and the size that this number does not divide.
    """


def split(model: nn.Module, ranks: Ranks, *, blocks: bool) -> dict[str, Cut]:
    """Convert a whole fused model on the meta device to this rank's part, in place. Return {parameter's name: its cut}.

    blocks: see `cuts_of`.

    The embedding, attention and MLPs compute partial sums and add them over the ranks, and the head joins the ranks'
    columns of logits. Activations between layers, and selected keys, have the same bits on all ranks that hold them.
    Raise DoesNotDivide (a ValueError) and leave the model unchanged if the model cannot be cut evenly.
    """
    cuts = cuts_of(model, ranks.size, blocks=blocks)
    if ranks.size == 1:
        return {}
    planned = [*planned_layers(model, ranks.size)]
    for name, cut in cuts.items():
        owner, _, attribute = name.rpartition(".")
        module, whole = model.get_submodule(owner), model.get_parameter(name)
        part = torch.empty(cut.shape, dtype=whole.dtype, device=whole.device)
        setattr(module, attribute, nn.Parameter(part, requires_grad=whole.requires_grad))
    for _, module, plan in planned:
        if plan.replicated:
            module.part_of_ranks = ranks
            continue
        for attribute in plan.counts:
            setattr(module, attribute, getattr(module, attribute) // ranks.size)
        if hasattr(module, "first"):
            module.first = ranks.rank * module.count
        if type(module) is nn.Embedding:
            module.__class__ = SplitEmbedding
    model.ranks = ranks  # `Scheduler` in generation/engine.py reads `model.ranks`
    for module in model.modules():
        if hasattr(module, "ranks"):
            module.ranks = ranks
        if isinstance(module, nn.ModuleList) and module and isinstance(module[0], FusedDecoderBlock | FusedHyperBlock):
            module[0].is_first = True
            # The last `FusedHyperBlock` does not gather all streams: `SplitDeepseekV4.forward` gathers their weighted
            # sum, which has fewer bytes.
            module[-1].is_last = isinstance(module[-1], FusedDecoderBlock)
        elif isinstance(block := getattr(module, "block", None), FusedDecoderBlock | FusedHyperBlock):
            block.is_first = block.is_last = True
    return cuts


def cuts_of(model: nn.Module, ranks: int, *, blocks: bool) -> dict[str, Cut]:
    """Return {parameter's name: its cut} for the parameters of a whole model that `split` cuts.

    ranks: the number of ranks; for 1, the result is empty.
    blocks: whether the checkpoint stores projections in FP8. Then no 128 x 128 block may be cut, because a block has
    one scale.
    Raise DoesNotDivide if the model, including the parts of replicated layers, cannot be cut evenly.
    """
    if ranks == 1:
        return {}
    planned = [*planned_layers(model, ranks)]
    for name, module, plan in planned:
        for attribute, what in plan.counts.items():
            count = getattr(module, attribute)
            if count % ranks:
                raise _does_not_divide(ranks, f"{count} {what}", name)
    cuts: dict[str, Cut] = {}
    for prefix, module, plan in planned:
        for name, parameter, dim in _planned_parameters(module, plan):
            whole, full_name = tuple(parameter.shape), f"{prefix}.{name}".lstrip(".")
            if not name.endswith(SCALES):  # if a weight divides evenly, so do its scales
                kind = "columns" if dim else "rows"
                if whole[dim] % ranks:
                    raise _does_not_divide(ranks, f"{whole[dim]} {kind}", full_name)
                has_blocks = blocks and plan.blocks and name.partition(".")[0] not in plan.unquantised
                if has_blocks and parameter.dim() == 2 and whole[dim] // ranks % BLOCK:
                    count = -(-whole[dim] // BLOCK)
                    raise _does_not_divide(ranks, f"{count} blocks of {BLOCK} {kind}", full_name)
            if not plan.replicated:
                cuts[full_name] = Cut(dim, whole, whole[dim] // ranks)
    return cuts


def planned_layers(model: nn.Module, ranks: int) -> Iterator[tuple[str, nn.Module, ShardingPlan]]:
    """Yield (name, module, plan) for every layer that has a plan.

    The plan has replicated=True for shared experts, and for attention with fewer than TILE_OF_HEADS heads per rank.
    """
    for name, module in model.named_modules():
        plan = plan_of(module)
        if plan is not None:
            attends = isinstance(module, DSAAttention | CompressedAttention)
            few_heads = attends and module.n_heads // ranks < TILE_OF_HEADS
            yield name, module, replace(plan, replicated=few_heads or name.endswith("shared_experts"))


@contextmanager
def counts_of_rank(model: nn.Module, ranks: int) -> Iterator[None]:
    """Inside the `with` block, the attributes that `split` divides by the number of ranks have a rank's values."""
    layers = [(module, plan) for _, module, plan in planned_layers(model, ranks) if ranks > 1 and not plan.replicated]
    counts = [(module, name, getattr(module, name)) for module, plan in layers for name in plan.counts]
    for module, name, count in counts:
        setattr(module, name, count // ranks)
    try:
        yield
    finally:
        for module, name, count in counts:
            setattr(module, name, count)


def plan_of(module: nn.Module) -> ShardingPlan | None:
    """Return the sharding plan for the module's class or the nearest base class with a plan; None if there is none."""
    return next((PLANS[kind] for kind in type(module).__mro__ if kind in PLANS), None)


def _planned_parameters(module: nn.Module, plan: ShardingPlan) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Yield (name, parameter, dim) for each parameter of the module that the plan cuts."""
    for dim, places in enumerate((plan.dim0, plan.dim1)):
        for name, parameter in module.named_parameters():
            if any(not place or name == place or name.startswith(f"{place}.") for place in places):
                yield name, parameter, dim


def _does_not_divide(ranks: int, what: str, name: str) -> DoesNotDivide:
    return DoesNotDivide(f"gpus: {ranks} do not evenly share the {what} of {name}")


def make_parts(model: nn.Module) -> None:
    """Set the `part` of every replicated layer.

    Call `make_parts` each time after the weights are loaded or moved, and before a CUDA graph is captured.
    """
    for layer in model.modules():
        ranks = getattr(layer, "part_of_ranks", None)
        if ranks is not None:
            # A registered submodule would list the parameters twice in the model, so set a plain attribute.
            vars(layer)["part"] = rank_part(layer, ranks.rank, ranks.size)


@torch.inference_mode(False)
@torch.no_grad()
def rank_part(layer: nn.Module, rank: int, size: int) -> nn.Module:
    """Return a copy of the layer with one rank's part of the parameters. The copy computes a partial sum.

    The copy's parameters are the layer's parameters or views of them. `join_layers` then copies those of cut FP8 layers
    in `joint_layers()`.
    """
    part, plan = copy.copy(layer), plan_of(layer)
    part._modules, part._parameters = dict(layer._modules), dict(layer._parameters)
    for name, count in {name: getattr(layer, name) for name in plan.counts}.items():
        setattr(part, name, count // size)
    for dim, names in enumerate((plan.dim0, plan.dim1)):
        for name in names:
            if layer._modules.get(name) is not None:
                part._modules[name] = _cut_module(layer._modules[name], dim, rank, size)
            elif layer._parameters.get(name) is not None:
                part._parameters[name] = _cut(layer._parameters[name], dim, rank, size)
    join_layers(part.joint_layers())
    return part


def copied(part: nn.Module) -> list[torch.Tensor]:
    """Return the parameters of a `part` that `rank_part` has copied."""
    layers = [layer for layer in part.joint_layers() if type(layer) is BlockFP8Linear and layer.part_of is not None]
    return [parameter for layer in layers for parameter in layer._parameters.values()]


def _cut_module(module: nn.Module, dim: int, rank: int, size: int) -> nn.Module:
    part = copy.copy(module)
    part._modules = {name: _cut_module(child, dim, rank, size) for name, child in module._modules.items()}
    parameters = module._parameters.items()
    part._parameters = {name: None if x is None else _cut(x, dim, rank, size) for name, x in parameters}
    if isinstance(module, BlockFP8Linear) and dim == 0:
        rows = len(module.weight) // size
        part.part_of, part._dequantised = (module, slice(rank * rows, (rank + 1) * rows)), None
    return part


def _cut(x: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    length = x.shape[dim] // size
    return x.detach().narrow(dim, rank * length, length)


class SplitDeepseekV4(DeepseekV4ForCausalLM):
    """`DeepseekV4ForCausalLM` on one or several ranks.

    In a sharded pass (`placement_of`), each layer returns the residual streams of this rank's rows only. `forward`
    collapses the streams to one before the ranks gather all rows.
    """

    ranks: Ranks = ALONE

    def forward(
        self,
        tokens: torch.Tensor,
        batch: TokenBatch,
        cache: CompressedKVCache | None = None,
        *,
        all_tokens: bool = False,
    ) -> torch.Tensor:
        placement = placement_of(batch, self.ranks)
        if not placement.sharded:
            return super().forward(tokens, batch, cache, all_tokens=all_tokens)
        (x,) = placement.all_gather(self.hc_head(super().states(tokens, batch, cache)))
        return self.head(self.norm(x if all_tokens else x[batch.last_tokens]))

    def states(self, tokens: torch.Tensor, batch: TokenBatch, cache: CompressedKVCache | None = None) -> torch.Tensor:
        (streams,) = placement_of(batch, self.ranks).all_gather(super().states(tokens, batch, cache))
        return streams

    def first_streams(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.ranks.size == 1:
            return super().first_streams(tokens)
        return self.embed(tokens)[:, None].expand(-1, self.config.hc_mult, -1).contiguous()


class SplitEmbedding(nn.Embedding):
    """`nn.Embedding` split over ranks. Rank r has the rows of tokens r * len(weight) to (r + 1) * len(weight) - 1."""

    ranks: Ranks = ALONE

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.ranks.sum(self._own(tokens - self.ranks.rank * len(self.weight)))

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of rows in [0, len(weight)), which this rank has; 0 for all other rows."""
        count, channels = self.weight.shape
        known = str(self.weight.dtype).removeprefix("torch.") in COMBINE_DTYPES
        if known and channels % CHANNEL_MULTIPLE == 0 and backends.runs_kernel("combine_experts", self.weight):
            # The kernel returns 0 for rows outside the weight. Without the kernel, do not call this op, because its
            # reference implementation would copy the weight.
            return dsa.combine_experts(self.weight, rows.reshape(-1, 1)).view(*rows.shape, channels)
        own = (rows >= 0) & (rows < count)
        y = nn.functional.embedding(rows.clamp(0, count - 1), self.weight)
        return y.masked_fill(~own[..., None], 0)
