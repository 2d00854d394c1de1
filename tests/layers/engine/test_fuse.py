"""Tests of `fuse` and `fused`: fused layers agree with the plain layers, and layers of other classes stay plain."""

import pytest
import torch
from torch import nn

from dsa_layers import DSAAttention, LightningIndexer, fuse, fused
from dsa_layers.engine.fuse import FUSED
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE
from dsa_layers.models.deepseek_v4 import DeepseekV4ForCausalLM, HyperDecoderBlock
from dsa_layers.models.deepseek_v32 import DecoderBlock
from tests.layers.io.stand_ins import assert_same_tensors
from tests.layers.layers import small_layers
from tests.layers.layers.small_layers import BATCH, CASES, HIDDEN, INDEXERS, ROPE, rows

WITHOUT_CASE = {DeepseekV4ForCausalLM}  # a whole model; models/test_parity.py tests it


def assert_agree(got, expected):
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_every_fused_class_has_a_case():
    assert CASES.keys() | WITHOUT_CASE == FUSED.keys()


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
@torch.no_grad()
def test_plain_and_fused_layers_agree_in_fp32(kind):
    case = CASES[kind]
    layer, x = case.make(), case.inputs()
    expected, state = case.run(layer, x), {name: value.clone() for name, value in layer.state_dict().items()}
    assert type(layer) is kind and type(fuse(layer)) is FUSED[kind]
    if kind in INDEXERS:
        assert torch.equal(case.run(layer, x), expected)
    else:
        assert_agree(case.run(layer, x), expected)
    assert_same_tensors(layer.state_dict(), state)
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_fused_layers_become_plain_after_the_with_block():
    layer, x = small_layers.decoder_block(), rows()
    frozen = layer.mlp.gate.e_score_correction_bias
    expected, _ = layer(x, *ROPE, BATCH)
    with fused(layer) as same, torch.no_grad():
        assert same is layer and type(layer.self_attn) is PagedAttention
        assert not any(parameter.requires_grad for parameter in layer.parameters())
        assert_agree(layer(x, *ROPE, BATCH)[0], expected)
    assert not {type(part) for part in layer.modules()} & {*FUSED.values()}
    assert all(parameter.requires_grad for parameter in layer.parameters() if parameter is not frozen)
    assert torch.equal(layer(x, *ROPE, BATCH)[0], expected) and not frozen.requires_grad


class Doubled(nn.Module):
    def forward(self, x, *_):
        return 2 * x


class OtherRouter(GroupedSigmoidRouter):
    def forward(self, x):
        experts, weights = super().forward(x)
        return experts, 2 * weights


class OtherIndexer(LightningIndexer):
    def head_weights(self, x):
        return -super().head_weights(x)


def other_mixture(**options):
    return MoE(HIDDEN, 64, OtherRouter(HIDDEN, 6, 2), **options)


def other_compressed_attention():
    indexer = small_layers.compressed_indexer()
    indexer.compressor.__class__ = type("OtherCompressor", (type(indexer.compressor),), {})
    return small_layers.compressed_attention(small_layers.compressor(512), indexer)


def hyper_block_of(ffn):
    block = small_layers.hyper_block()
    block.ffn = ffn
    return block


OTHER_INDEXER = OtherIndexer(HIDDEN, 128, n_heads=4, top_k=4, quantize=False)
# {name: (class of the layer, function that makes it, submodule that `fuse` must not replace; "" is the layer itself)}
FOREIGN = {
    "router": (DecoderBlock, lambda: small_layers.decoder_block(other_mixture), "mlp"),
    "lightning indexer": (DSAAttention, lambda: small_layers.attention(OTHER_INDEXER), "indexer"),
    "module in a hyper block": (HyperDecoderBlock, lambda: hyper_block_of(Doubled()), ""),
    "compressor": (CompressedAttention, other_compressed_attention, "indexer"),
}


@pytest.mark.parametrize(("kind", "make", "plain"), FOREIGN.values(), ids=FOREIGN)
@torch.no_grad()
def test_a_layer_with_a_foreign_class_inside_stays_plain_and_runs(kind, make, plain):
    layer, case = make(), CASES[kind]
    x, before = case.inputs(), type(layer.get_submodule(plain))
    expected = case.run(layer, x)
    fuse(layer)
    assert type(layer.get_submodule(plain)) is before
    assert {type(part) for part in layer.modules()} & {*FUSED.values()}, "the other parts are fused"
    assert_agree(case.run(layer, x), expected)
