"""Which parameters of a model several ranks share, and along what: attention by heads, MLPs by their inner channels,
experts by their number, embeddings and heads by the vocabulary. All others every rank has whole.

    layer               rows (dim 0)                     columns (dim 1)
    DSAAttention        q_b_proj, kv_b_proj              o_proj
    CompressedAttention wq_b, attn_sink, wo_a (groups)   wo_b
    SwiGLU              gate_proj, up_proj               down_proj
    Experts             all of it (experts)
    the model           embedding, head (vocabulary)

A rank has the part of its number, of as many equal ones as there are ranks, so that the products of row-wise and then
column-wise parts are summands of what one rank computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from dsa_layers.families.deepseek_v4.model import DeepseekV4ForCausalLM
from dsa_layers.families.sparse_mla.model import SparseMLAForCausalLM
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.experts import Experts
from dsa_layers.layers.linear import BLOCK
from dsa_layers.layers.moe import SwiGLU

ROWS, COLUMNS = 0, 1
# Of a kind of module: what in it is shared, and the dimension that is cut.
CUTS: dict[type[nn.Module], dict[str, int]] = {
    DSAAttention: {"q_b_proj": ROWS, "kv_b_proj": ROWS, "o_proj": COLUMNS},
    CompressedAttention: {"wq_b": ROWS, "attn_sink": ROWS, "wo_a.matrices": ROWS, "wo_b": COLUMNS},
    SwiGLU: {"gate_proj": ROWS, "up_proj": ROWS, "down_proj": COLUMNS},
    Experts: {"": ROWS},
    SparseMLAForCausalLM: {"model.embed_tokens": ROWS, "lm_head": ROWS},
    DeepseekV4ForCausalLM: {"embed": ROWS, "head": ROWS},
}
PROJECTING = (DSAAttention, CompressedAttention, SwiGLU)  # whose matrices FP8 checkpoints store in FP8
# What must be shared evenly, of modules that are cut by it.
COUNTS = (
    (DSAAttention, "n_heads", "attention heads"),
    (CompressedAttention, "n_heads", "attention heads"),
    (CompressedAttention, "o_groups", "groups of attention heads"),
    (Experts, "down_proj", "experts"),
)
SCALES = "_scale_inv"


@dataclass(frozen=True)
class Cut:
    """A parameter of which each rank has `size` numbers of the dimension `dim`. whole: its shape on one rank."""

    dim: int
    whole: tuple[int, ...]
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a rank's part."""
        return (*self.whole[: self.dim], self.size, *self.whole[self.dim + 1 :])

    def part(self, rank: int) -> tuple[slice, ...]:
        """Where the part of a rank lies in the whole."""
        own = slice(rank * self.size, (rank + 1) * self.size)
        return (*(slice(0, n) for n in self.whole[: self.dim]), own)


class DoesNotDivide(ValueError):
    """So many ranks cannot have equal parts of the model. Names their number, and what they cannot share."""


def cuts_of(model: nn.Module, ranks: int, *, blocks: bool) -> dict[str, Cut]:
    """{parameter's name: its cut} of a whole model. blocks: projections are stored in FP8, whose blocks of 128 x 128
    share a scale and are not cut. Raises DoesNotDivide for a model that does not come apart evenly."""
    if ranks == 1:
        return {}
    _check_counts(model, ranks)
    cuts: dict[str, Cut] = {}
    for name, parameter, dim, stored_in_fp8 in _shared(model):
        whole, kind = tuple(parameter.shape), "rows" if dim == ROWS else "columns"
        if name.endswith(SCALES):  # whose weight came before it
            cuts[name] = Cut(dim, whole, whole[dim] // ranks)
            continue
        if whole[dim] % ranks:
            raise _does_not_divide(ranks, f"{whole[dim]} {kind}", name)
        if blocks and stored_in_fp8 and whole[dim] // ranks % BLOCK:
            raise _does_not_divide(ranks, f"{-(-whole[dim] // BLOCK)} blocks of {BLOCK} {kind}", name)
        cuts[name] = Cut(dim, whole, whole[dim] // ranks)
    return cuts


def _check_counts(model: nn.Module, ranks: int) -> None:
    for name, module in model.named_modules():
        for kind, attribute, what in COUNTS:
            if isinstance(module, kind):
                value = getattr(module, attribute)
                count = len(value) if isinstance(value, torch.Tensor) else value
                if count % ranks:
                    raise _does_not_divide(ranks, f"{count} {what}", name)


def _does_not_divide(ranks: int, what: str, name: str) -> DoesNotDivide:
    return DoesNotDivide(f"gpus: {ranks} do not evenly share the {what} of {name}")


def _shared(model: nn.Module) -> Iterator[tuple[str, torch.Tensor, int, bool]]:
    """(name, parameter, dim, whether it is a projection's) of all that is shared."""
    for prefix, module in model.named_modules():
        for place, dim in next((cuts for kind, cuts in CUTS.items() if isinstance(module, kind)), {}).items():
            for name, parameter in module.named_parameters():
                if not place or name == place or name.startswith(f"{place}."):
                    stored_in_fp8 = isinstance(module, PROJECTING) and parameter.dim() == 2
                    yield f"{prefix}.{name}".lstrip("."), parameter, dim, stored_in_fp8
