"""Conversion of a model's layers to faster layers for inference, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

from torch import nn

from dsa_layers.engine.fused_blocks import (
    FusedConnection,
    FusedDecoderBlock,
    FusedHead,
    FusedHyperBlock,
    FusedHyperConnection,
    FusedHyperHead,
    FusedHYV4Block,
    FusedIndependentHyperConnection,
)
from dsa_layers.engine.fused_moe import FusedMoE, FusedSwiGLU
from dsa_layers.engine.joint_linear import join, pad_scales
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.engine.paged_compressed_attention import PagedCompressedAttention
from dsa_layers.engine.paged_delta_attention import PagedDeltaAttention
from dsa_layers.engine.paged_indexer import PagedCompressedIndexer, PagedCompressor, PagedIndexer
from dsa_layers.engine.paged_pooled_indexer import PagedPooledIndexer
from dsa_layers.engine.paged_window_attention import PagedWindowAttention
from dsa_layers.engine.split import SplitDeepseekV4, make_parts
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.compressor import CompressedIndexer, Compressor
from dsa_layers.layers.experts import Experts
from dsa_layers.layers.hyper_connections import HyperConnection, HyperHead, IndependentHyperConnection
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.kimi_delta_attention import KimiDeltaAttention
from dsa_layers.layers.linear import LanguageModelHead
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SoftmaxRouter, SqrtSoftplusRouter, SwiGLU
from dsa_layers.layers.pooled_indexer import PooledIndexer
from dsa_layers.layers.window_attention import WindowAttention
from dsa_layers.models.deepseek_v4 import DeepseekV4ForCausalLM, HyperDecoderBlock
from dsa_layers.models.deepseek_v32 import DecoderBlock
from dsa_layers.models.hy_v4 import HYV4DecoderBlock

# {layer: its faster version for inference}
FUSED: dict[type[nn.Module], type[nn.Module]] = {
    CompressedAttention: PagedCompressedAttention,
    CompressedIndexer: PagedCompressedIndexer,
    Compressor: PagedCompressor,
    DSAAttention: PagedAttention,
    WindowAttention: PagedWindowAttention,
    DecoderBlock: FusedDecoderBlock,
    DeepseekV4ForCausalLM: SplitDeepseekV4,
    HYV4DecoderBlock: FusedHYV4Block,
    HyperConnection: FusedHyperConnection,
    HyperDecoderBlock: FusedHyperBlock,
    HyperHead: FusedHyperHead,
    IndependentHyperConnection: FusedIndependentHyperConnection,
    KimiDeltaAttention: PagedDeltaAttention,
    LanguageModelHead: FusedHead,
    LightningIndexer: PagedIndexer,
    MoE: FusedMoE,
    PooledIndexer: PagedPooledIndexer,
    SwiGLU: FusedSwiGLU,
}
# {class: {submodule: its accepted classes}}. If a submodule has another class, `fuse` keeps the module's class.
_PARTS: dict[type[nn.Module], dict[str, tuple[type, ...]]] = {
    CompressedAttention: {"compressor": (PagedCompressor, type(None))},
    CompressedIndexer: {"compressor": (PagedCompressor,)},
    DecoderBlock: {"self_attn": (PagedAttention, PagedWindowAttention), "mlp": (FusedSwiGLU, FusedMoE)},
    HYV4DecoderBlock: {
        "self_attn": (PagedAttention, PagedDeltaAttention),
        "mlp": (FusedSwiGLU, FusedMoE),
        "attn_hc": (FusedHyperConnection, FusedIndependentHyperConnection),
        "ffn_hc": (FusedHyperConnection, FusedIndependentHyperConnection),
    },
    HyperDecoderBlock: {
        "attn": (PagedCompressedAttention,),
        "ffn": (FusedMoE,),
        "hc_attn": (FusedHyperConnection,),
        "hc_ffn": (FusedHyperConnection,),
    },
    MoE: {
        "gate": (GroupedSigmoidRouter, SoftmaxRouter, SqrtSoftplusRouter),
        "experts": (Experts,),
        "shared_experts": (FusedSwiGLU, type(None)),
    },
}

Module = TypeVar("Module", bound=nn.Module)


def fuse(module: Module) -> Module:
    """Prepare a model or a layer for inference, in place, and return it.

    `fuse` changes the class of each module whose class is in FUSED, and sets requires_grad=False for all parameters. It
    keeps the class of subclasses of the layers in FUSED, and of layers with submodules that _PARTS rejects. Fused
    attention accepts a cache. A fused layer may bypass its submodules, so hooks on linear layers inside it may not run.
    Unless a parameter is on the meta device, `fuse` also calls `prepare`, which may make several weights views of one
    tensor. So call `fuse` after the weights are on their device and before a CUDA graph is captured. If you fuse a
    model on the meta device, as `load_model` does, call `prepare` after you have loaded the weights.
    """
    for part in reversed([*module.modules()]):  # submodules before the modules that contain them
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
                elif type(block) is type(after) is FusedHYV4Block:
                    block.following = (after.attn_hc,)
    module.requires_grad_(False)
    if not any(parameter.is_meta for parameter in module.parameters()):
        prepare(module)
    return module


def prepare(module: nn.Module) -> None:
    """Join weights (`join`), pad their scales (`pad_scales`), compute the tensors that fused layers derive from
    weights, and call `make_parts`.

    Call `prepare` after the weights are loaded or moved, and before a CUDA graph is captured.
    """
    join(module)
    pad_scales(module)
    for part in module.modules():
        if isinstance(part, FusedConnection | FusedHyperHead):
            part.prepare()
    make_parts(module)


@contextmanager
def fused(module: Module) -> Iterator[Module]:
    """Fuse the module inside a `with` block, for example to generate text with a model during its training.

    The end of the block restores the classes of the layers and requires_grad of the parameters.
    """
    plain = [(part, type(part)) for part in module.modules() if type(part) in FUSED]
    learning = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        yield fuse(module)
    finally:
        for part, kind in plain:
            part.__class__ = kind
        for parameter in learning:
            parameter.requires_grad_(True)
