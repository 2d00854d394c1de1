"""What several ranks that compute one model have parts of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.experts import Experts
from dsa_layers.layers.linear import Embedding, LanguageModelHead
from dsa_layers.layers.moe import SwiGLU

# Heads that the kernels of attention over selected keys take as one tile: fewer cost about as much as these, since each
# query gathers its keys for all of them.
TILE_OF_HEADS = 64


@dataclass(frozen=True)
class Shares:
    """How a layer is split into equal parts, of which rank r has the r-th.

    rows, columns  parameters by name, or all those below a submodule's name, "" being the layer itself: cut along
                   dimension 0 or 1. Every rank has all others whole
    counts         attributes that count what is cut, and what that is: {"n_heads": "attention heads"}
    blocks         whether FP8 checkpoints store the matrices in blocks of 128 x 128, which are not cut
    whole          whether each rank has the whole layer, and computes it for its own tokens in prompts of many tokens.
                   In other passes it computes its part (rank_part.py)
    """

    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    counts: Mapping[str, str] = field(default_factory=dict)
    blocks: bool = True
    whole: bool = False


SHARES: dict[type[nn.Module], Shares] = {
    DSAAttention: Shares(("q_b_proj", "kv_b_proj"), ("o_proj",), {"n_heads": "attention heads"}),
    CompressedAttention: Shares(
        ("wq_b", "attn_sink", "wo_a"),
        ("wo_b",),
        {"n_heads": "attention heads", "o_groups": "groups of attention heads"},
    ),
    SwiGLU: Shares(("gate_proj", "up_proj"), ("down_proj",)),
    Experts: Shares(("",), counts={"count": "experts"}, blocks=False),
    Embedding: Shares(("weight",), blocks=False),
    LanguageModelHead: Shares(("weight",), blocks=False),
}


def shares_in(module: nn.Module) -> Shares | None:
    """How a module is split; None if it is not."""
    return next((SHARES[kind] for kind in type(module).__mro__ if kind in SHARES), None)


def shares_of(model: nn.Module, ranks: int) -> Iterator[tuple[str, nn.Module, Shares]]:
    """(name, module, its shares) of all that so many ranks split.

    Ranks have shared experts whole, and attention whose heads would fill no tile on a rank.
    """
    for name, module in model.named_modules():
        shares = shares_in(module)
        if shares is not None:
            few_heads = hasattr(module, "n_heads") and module.n_heads // ranks < TILE_OF_HEADS
            yield name, module, replace(shares, whole=few_heads or name.endswith("shared_experts"))
