"""Small layers of classes that `dsa_layers.fuse` replaces, each with inputs and a function that runs it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from dsa_layers import DSAAttention, LightningIndexer, RotaryEmbedding, SequenceBatch, rope_frequencies
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.compressor import CompressedIndexer, Compressor
from dsa_layers.layers.hyper_connections import HyperConnection, HyperHead, IndependentHyperConnection, StreamMixing
from dsa_layers.layers.kimi_delta_attention import KimiDeltaAttention
from dsa_layers.layers.linear import LanguageModelHead
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SwiGLU
from dsa_layers.layers.pooled_indexer import PooledIndexer
from dsa_layers.layers.window_attention import WindowAttention
from dsa_layers.models.deepseek_v4 import HyperDecoderBlock
from dsa_layers.models.deepseek_v32 import DecoderBlock
from dsa_layers.models.hy_v4 import HYV4DecoderBlock

HIDDEN, RANK, STREAMS, RATIO = 256, 128, 4, 4
ROTARY = RotaryEmbedding(rope_frequencies(64, 1e4))
BATCH = SequenceBatch.without_cache([30, 9])
TOKENS = sum(BATCH.query_lens)
ROPE, ENTRY_ROPE = ROTARY(BATCH.positions), ROTARY(BATCH.entries(RATIO).positions)


def indexer(**options) -> LightningIndexer:
    return LightningIndexer(HIDDEN, RANK, **{"n_heads": 4, "top_k": 4, "quantize": False} | options)


def attention(indexer=None, **options) -> DSAAttention:
    return DSAAttention(HIDDEN, 2, indexer, **{"q_lora_rank": RANK} | options)


def window_attention() -> WindowAttention:
    options = {"gate": "heads", "scale_latents": True, "norm_rope_keys": True}
    return WindowAttention(HIDDEN, 2, window=7, q_lora_rank=RANK, kv_lora_rank=96, **options)


def swiglu(**options) -> SwiGLU:
    return SwiGLU(HIDDEN, 128, **options)


def moe(**options) -> MoE:
    return MoE(HIDDEN, 128, GroupedSigmoidRouter(HIDDEN, 6, 2, dtype=options.get("dtype")), **options)


def decoder_block(mlp=moe, **options) -> DecoderBlock:
    own = {"quantize": options.get("fp8", False)}
    block = DecoderBlock(HIDDEN, attention(indexer(**own, **options), **options), mlp(**options))
    for norm in (block.input_layernorm, block.post_attention_layernorm):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return block


def hy_block() -> HYV4DecoderBlock:
    connections = [IndependentHyperConnection(HIDDEN, STREAMS) for _ in range(2)]
    for connection in connections:
        nn.init.normal_(connection.fn, std=0.05)
        nn.init.normal_(connection.base)
    layer = attention(indexer(quantize=False), gate="x", sinks=True)
    nn.init.normal_(layer.sinks)
    return HYV4DecoderBlock(HIDDEN, layer, moe(), *connections)


def delta_attention() -> KimiDeltaAttention:
    layer = KimiDeltaAttention(HIDDEN, 2, dim=16)
    nn.init.normal_(layer.A_log)
    nn.init.normal_(layer.dt_bias)
    return layer


def pooled_indexer() -> PooledIndexer:
    layer = PooledIndexer(HIDDEN, RANK, n_heads=4, top_k=8, quantize=False)
    nn.init.normal_(layer.index_kpool_compress_ape)
    nn.init.normal_(layer.index_kpool_compress_gate, std=0.1)
    return layer


def compressor(dim=128, **options) -> Compressor:
    return Compressor(HIDDEN, dim, RATIO, overlap=True, **options)


def compressed_indexer(heads=4) -> CompressedIndexer:
    return CompressedIndexer(HIDDEN, RANK, compressor(), n_heads=heads, top_k=3, quantize=False)


def compressed_attention(compressor=None, indexer=None, heads=2, **options) -> CompressedAttention:
    sizes = {"dim": 512, "window": 4, "q_lora_rank": RANK, "o_groups": 2, "o_lora_rank": 128}
    layer = CompressedAttention(HIDDEN, heads, compressor=compressor, indexer=indexer, **sizes, **options)
    nn.init.normal_(layer.attn_sink)
    nn.init.normal_(layer.kv_norm.weight, 1, 0.2)
    return layer


def indexed_attention(heads=4) -> CompressedAttention:
    return compressed_attention(compressor(512), compressed_indexer(heads))


def hyper(kind=HyperConnection) -> StreamMixing:
    made = kind(HIDDEN, STREAMS)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.1)
    return made


def hyper_block(**options) -> HyperDecoderBlock:
    mixing = {"hc_attn": hyper(), "hc_ffn": hyper()}
    block = HyperDecoderBlock(HIDDEN, compressed_attention(**options), moe(**options), **mixing)
    for norm in (block.attn_norm, block.ffn_norm):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
    return block


def rows(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN).to(dtype)


def streams(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(TOKENS, STREAMS, HIDDEN).to(dtype)


def expand_collapsed(connection: HyperConnection | IndependentHyperConnection, x: torch.Tensor) -> torch.Tensor:
    y, *weights = connection.collapse(x)
    return connection.expand(y, x, *weights)


def run_hyper_block(block: HyperDecoderBlock, x: torch.Tensor) -> torch.Tensor:
    return block(x, None, ROPE, None, BATCH)


class Case(NamedTuple):
    """make() returns the layer, inputs() returns its input x, and run(layer, x) returns the result."""

    make: Callable[[], nn.Module]
    run: Callable[[nn.Module, torch.Tensor], torch.Tensor] = nn.Module.__call__
    inputs: Callable[[], torch.Tensor] = rows


CASES = {
    CompressedAttention: Case(indexed_attention, lambda layer, x: layer(x, ROPE, ENTRY_ROPE, BATCH)),
    CompressedIndexer: Case(
        compressed_indexer, lambda layer, x: layer.select(x, x[:, :RANK], ROPE, BATCH, entry_rope=ENTRY_ROPE)
    ),
    Compressor: Case(compressor, lambda layer, x: layer.compress(x, *ENTRY_ROPE, BATCH)),
    DSAAttention: Case(lambda: attention(indexer()), lambda layer, x: layer(x, *ROPE, BATCH)[0]),
    DecoderBlock: Case(decoder_block, lambda layer, x: layer(x, *ROPE, BATCH)[0]),
    HYV4DecoderBlock: Case(hy_block, lambda layer, x: layer(x, *ROPE, BATCH)[0], streams),
    HyperConnection: Case(hyper, expand_collapsed, streams),
    HyperDecoderBlock: Case(hyper_block, run_hyper_block, streams),
    HyperHead: Case(lambda: hyper(HyperHead), inputs=streams),
    IndependentHyperConnection: Case(lambda: hyper(IndependentHyperConnection), expand_collapsed, streams),
    KimiDeltaAttention: Case(delta_attention, lambda layer, x: layer(x, *ROPE, BATCH)[0]),
    LanguageModelHead: Case(lambda: LanguageModelHead(HIDDEN, 50)),
    LightningIndexer: Case(indexer, lambda layer, x: layer.select(x, x[:, :RANK], ROPE, BATCH)),
    MoE: Case(moe),
    PooledIndexer: Case(pooled_indexer, lambda layer, x: layer.select(x, x[:, :RANK], ROPE, BATCH)),
    SwiGLU: Case(swiglu),
    WindowAttention: Case(window_attention, lambda layer, x: layer(x, *ROPE, BATCH)[0]),
}
INDEXERS = (CompressedIndexer, LightningIndexer, PooledIndexer)  # their results are indices
