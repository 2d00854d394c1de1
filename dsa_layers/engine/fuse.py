"""Modules in plain form become those of the engine, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

from torch import nn

from dsa_layers.engine.fused_block import FusedDecoderBlock
from dsa_layers.engine.fused_hyper_block import FusedHyperBlock, FusedHyperConnection, FusedHyperHead
from dsa_layers.engine.fused_moe import FusedMoE, FusedSwiGLU
from dsa_layers.engine.joint_linear import join
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.engine.paged_compressed_attention import PagedCompressedAttention
from dsa_layers.engine.paged_compressor import PagedCompressedIndexer, PagedCompressor
from dsa_layers.engine.paged_indexer import PagedIndexer
from dsa_layers.engine.split import make_parts
from dsa_layers.engine.split_deepseek_v4 import SplitDeepseekV4
from dsa_layers.engine.vocabulary import FusedHead
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.compressed_indexer import CompressedIndexer
from dsa_layers.layers.compressor import Compressor
from dsa_layers.layers.experts import Experts
from dsa_layers.layers.hyper_connections import HyperConnection, HyperHead
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.linear import LanguageModelHead
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SqrtSoftplusRouter, SwiGLU
from dsa_layers.models.deepseek_v4 import DeepseekV4ForCausalLM, HyperDecoderBlock
from dsa_layers.models.deepseek_v32 import DecoderBlock

FUSED: dict[type[nn.Module], type[nn.Module]] = {
    CompressedAttention: PagedCompressedAttention,
    CompressedIndexer: PagedCompressedIndexer,
    Compressor: PagedCompressor,
    DSAAttention: PagedAttention,
    DecoderBlock: FusedDecoderBlock,
    DeepseekV4ForCausalLM: SplitDeepseekV4,
    HyperConnection: FusedHyperConnection,
    HyperDecoderBlock: FusedHyperBlock,
    HyperHead: FusedHyperHead,
    LanguageModelHead: FusedHead,
    LightningIndexer: PagedIndexer,
    MoE: FusedMoE,
    SwiGLU: FusedSwiGLU,
}
# {class: {submodule: the classes that it must have}}. With another class there the module stays in plain form.
_PARTS: dict[type[nn.Module], dict[str, tuple[type, ...]]] = {
    CompressedAttention: {"compressor": (PagedCompressor, type(None))},
    CompressedIndexer: {"compressor": (PagedCompressor,)},
    DecoderBlock: {"self_attn": (PagedAttention,), "mlp": (FusedSwiGLU, FusedMoE)},
    HyperDecoderBlock: {
        "attn": (PagedCompressedAttention,),
        "ffn": (FusedMoE,),
        "hc_attn": (FusedHyperConnection,),
        "hc_ffn": (FusedHyperConnection,),
    },
    MoE: {
        "gate": (GroupedSigmoidRouter, SqrtSoftplusRouter),
        "experts": (Experts,),
        "shared_experts": (FusedSwiGLU, type(None)),
    },
}

Module = TypeVar("Module", bound=nn.Module)


def fuse(module: Module) -> Module:
    """Prepares a model or a layer for inference, in place, and returns it.

    Layers get other classes with the same parameters and submodules. Their passes take a cache and are faster. They
    call few of their submodules, so hooks on linear layers inside of them may not run. Parameters take no gradient from
    then on, and weights that read the same input lie in one tensor. Subclasses of the layers stay as they are, and so
    do layers with other classes inside. Call it once the weights are on their device and before a CUDA graph is
    captured. `load_model` has called it, unless the model is trainable.
    """
    for part in reversed([*module.modules()]):  # parts before the modules that hold them
        kind = FUSED.get(type(part))
        if kind is not None and all(
            type(getattr(part, name)) in accepted for name, accepted in _PARTS.get(type(part), {}).items()
        ):
            part.__class__ = kind
    for part in module.modules():
        if isinstance(part, nn.ModuleList):
            for block, after in pairwise(part):
                if type(block) is type(after) is FusedHyperBlock:
                    block.following = (after.hc_attn,)
    module.requires_grad_(False)
    if not any(parameter.is_meta for parameter in module.parameters()):
        prepare(module)
    return module


def prepare(module: nn.Module) -> None:
    """Derive from the weights of a fused module what its passes read in addition, and lay joint weights side by side.
    Call it after the weights are loaded or changed, on their device, and before a CUDA graph is captured."""
    join(module)
    for part in module.modules():
        if isinstance(part, FusedHyperConnection | FusedHyperHead):
            part.prepare()
    make_parts(module)


@contextmanager
def fused(module: Module) -> Iterator[Module]:
    """`fuse` for the time of a `with`: a model that is being trained generates text in it."""
    plain = [(part, type(part)) for part in module.modules() if type(part) in FUSED]
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        yield fuse(module)
    finally:
        for part, kind in plain:
            part.__class__ = kind
        for parameter in learning:
            parameter.requires_grad_(True)
