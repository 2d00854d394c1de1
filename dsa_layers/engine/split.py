"""Tensor parallelism: a model on the meta device becomes one rank's part of it.

A sharded parameter is cut into as many equal parts as there are ranks, and rank r has the r-th. A layer that is cut
along dimension 1 follows one that is cut along dimension 0, and gives a partial sum of the result.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from dsa_layers.engine.fused_block import FusedDecoderBlock
from dsa_layers.engine.fused_hyper_block import FusedHyperBlock
from dsa_layers.engine.joint_linear import join_layers
from dsa_layers.engine.vocabulary import SplitEmbedding
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.experts import Experts
from dsa_layers.layers.linear import BLOCK, BlockFP8Linear, Embedding, LanguageModelHead
from dsa_layers.layers.moe import SwiGLU
from dsa_layers.parallel.ranks import Ranks

# The kernels of attention over selected keys take this many heads as one tile. Fewer heads cost about as much, since
# each query gathers its keys once for all of them.
TILE_OF_HEADS = 64
SCALES = "_scale_inv"


@dataclass(frozen=True)
class ShardingPlan:
    """How the ranks share a layer.

    dim0, dim1  the parameters that are cut along dimension 0 or 1: their names, or the name of a submodule for all
                below it, "" for all of the layer. Every rank has all other parameters whole
    counts      attributes that count what is cut: {"n_heads": "attention heads"}
    blocks      whether FP8 checkpoints store the matrices in blocks of 128 x 128, which are not cut
    replicated  whether each rank has the whole layer, and computes it for its local rows in prompts of many tokens. In
                other passes it computes its part (`rank_part`)
    """

    dim0: tuple[str, ...] = ()
    dim1: tuple[str, ...] = ()
    counts: Mapping[str, str] = field(default_factory=dict)
    blocks: bool = True
    replicated: bool = False


PLANS: dict[type[nn.Module], ShardingPlan] = {
    DSAAttention: ShardingPlan(("q_b_proj", "kv_b_proj"), ("o_proj",), {"n_heads": "attention heads"}),
    CompressedAttention: ShardingPlan(
        ("wq_b", "attn_sink", "wo_a"),
        ("wo_b",),
        {"n_heads": "attention heads", "o_groups": "groups of attention heads"},
    ),
    SwiGLU: ShardingPlan(("gate_proj", "up_proj"), ("down_proj",)),
    Experts: ShardingPlan(("",), counts={"count": "experts"}, blocks=False),
    Embedding: ShardingPlan(("weight",), blocks=False),
    LanguageModelHead: ShardingPlan(("weight",), blocks=False),
}


@dataclass(frozen=True)
class Cut:
    """A parameter of which each rank has `size` numbers of the dimension `dim`. whole: its shape on one rank."""

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
    """The model cannot be cut into this many equal parts. The message names the number of ranks, and what does
    not divide by it."""


def split(model: nn.Module, ranks: Ranks, *, blocks: bool) -> dict[str, Cut]:
    """Turn a fused model, on the meta device and whole, into this rank's part. Return what was cut and how.
    blocks: as of `cuts_of`.

    Attention and MLPs give partial sums (`Placement`), and the head joins the ranks' columns of logits. Replicated
    layers are not cut. So activations between layers, and selected keys, have the same bits on all ranks that have
    them.
    Raises ValueError, with the model unchanged, for one that cannot be cut evenly.
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
        if type(module) is Embedding:
            module.__class__ = SplitEmbedding
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


def cuts_of(model: nn.Module, ranks: int, *, blocks: bool) -> dict[str, Cut]:
    """{parameter's name: its cut} of a whole model. blocks: projections are stored in FP8, whose blocks of 128 x 128
    share a scale and are not cut. Raises DoesNotDivide for a model that cannot be cut evenly, including the parts of
    replicated layers."""
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
            if not name.endswith(SCALES):  # scales divide if their weight does
                kind = "columns" if dim else "rows"
                if whole[dim] % ranks:
                    raise _does_not_divide(ranks, f"{whole[dim]} {kind}", full_name)
                if blocks and plan.blocks and parameter.dim() == 2 and whole[dim] // ranks % BLOCK:
                    count = -(-whole[dim] // BLOCK)
                    raise _does_not_divide(ranks, f"{count} blocks of {BLOCK} {kind}", full_name)
            if not plan.replicated:
                cuts[full_name] = Cut(dim, whole, whole[dim] // ranks)
    return cuts


def planned_layers(model: nn.Module, ranks: int) -> Iterator[tuple[str, nn.Module, ShardingPlan]]:
    """(name, module, plan) of all layers that this many ranks share.

    Shared experts are replicated, and so is attention that would have fewer heads per rank than a tile of its kernels.
    """
    for name, module in model.named_modules():
        plan = plan_of(module)
        if plan is not None:
            few_heads = hasattr(module, "n_heads") and module.n_heads // ranks < TILE_OF_HEADS
            yield name, module, replace(plan, replicated=few_heads or name.endswith("shared_experts"))


def plan_of(module: nn.Module) -> ShardingPlan | None:
    """How ranks share a module; None if every rank has it whole."""
    return next((PLANS[kind] for kind in type(module).__mro__ if kind in PLANS), None)


def _planned_parameters(module: nn.Module, plan: ShardingPlan) -> Iterator[tuple[str, torch.Tensor, int]]:
    """(name, parameter, dim) of the module's parameters that are cut."""
    for dim, places in enumerate((plan.dim0, plan.dim1)):
        for name, parameter in module.named_parameters():
            if any(not place or name == place or name.startswith(f"{place}.") for place in places):
                yield name, parameter, dim


def _does_not_divide(ranks: int, what: str, name: str) -> DoesNotDivide:
    return DoesNotDivide(f"gpus: {ranks} do not evenly share the {what} of {name}")


def make_parts(model: nn.Module) -> None:
    """Give every replicated layer its `part`. Call it after the weights are loaded and on their device, and before a
    CUDA graph is captured; call it again after they are loaded or moved again."""
    for layer in model.modules():
        ranks = getattr(layer, "part_of_ranks", None)
        if ranks is not None:
            # Not as a submodule, whose parameters the model would have twice.
            vars(layer)["part"] = rank_part(layer, ranks.rank, ranks.size)


@torch.inference_mode(False)
@torch.no_grad()
def rank_part(layer: nn.Module, rank: int, size: int) -> nn.Module:
    """The layer with one rank's part of the parameters. It computes a partial sum.

    The parameters are views of the layer's, except those of FP8 layers that lie side by side for one product.
    """
    part, plan = copy.copy(layer), plan_of(layer)
    part._modules, part._parameters = dict(layer._modules), dict(layer._parameters)
    for name, count in {name: getattr(layer, name) for name in plan.counts}.items():
        setattr(part, name, count // size)
    for dim, names in enumerate((plan.dim0, plan.dim1)):
        for name in names:
            if name in layer._modules:
                part._modules[name] = _cut_module(layer._modules[name], dim, rank, size)
            else:
                part._parameters[name] = _cut(layer._parameters[name], dim, rank, size)
    join_layers(part.joint_layers())
    return part


def copied(part: nn.Module) -> list[torch.Tensor]:
    """The parameters of a part that are no views of the layer's, given that a part of the joint layers is cut."""
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
