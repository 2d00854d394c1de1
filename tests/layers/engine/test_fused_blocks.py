"""Tests of fused blocks, norms with FP8 casts, and hyper-connections."""

from collections import Counter

import pytest
import torch
from torch import nn

import dsa
from dsa_layers.engine.fuse import fuse
from dsa_layers.engine.fused_blocks import FusedDecoderBlock, MixedStreams, _FusedMixing, split_in_bf16
from dsa_layers.engine.joint_linear import norm_and_cast
from dsa_layers.layers.hyper_connections import HyperConnection, HyperHead
from dsa_layers.layers.linear import BlockFP8Linear, Linear
from dsa_layers.layers.moe import SwiGLU
from dsa_layers.layers.norm import RMSNorm
from tests.layers.layers import small_layers
from tests.layers.layers.calls import record
from tests.layers.layers.small_layers import BATCH, HIDDEN, ROPE, run_hyper_block, streams

BF16 = torch.bfloat16


@pytest.fixture
def calls(monkeypatch):
    """Return the growing list of the names of the called ops for hyper-connections and norms."""
    hyper = ("hyper_collapse", "hyper_collapse_norm_cast_to_fp8", "hyper_expand", "hyper_expand_mix", "hyper_mix")
    return record(monkeypatch, *hyper, "rms_norm", "rms_norm_cast_to_fp8", "add_rms_norm_cast_to_fp8")


def norm(channels=HIDDEN, kind=RMSNorm):
    made = kind(channels)
    torch.nn.init.uniform_(made.weight, 0.5, 1.5)
    return made


@pytest.mark.parametrize("use_ue8m0", [True, False])
@torch.no_grad()
def test_one_op_has_the_bits_of_sum_norm_and_cast(use_ue8m0, calls):
    layer, own = BlockFP8Linear(HIDDEN, 128, use_ue8m0=use_ue8m0), norm()
    x, residual = small_layers.rows(BF16), small_layers.rows(BF16)
    for h, (total, y, cast) in (
        (x, norm_and_cast(own, x, (layer,))),
        (residual + x, norm_and_cast(own, x, (layer,), residual)),
    ):
        assert torch.equal(total, h) and torch.equal(y, own(h))
        q, scale = layer.cast(y)
        assert torch.equal(cast[0].view(torch.int8), q.view(torch.int8)) and torch.equal(cast[1], scale)
    assert calls[:2] == ["rms_norm_cast_to_fp8", "add_rms_norm_cast_to_fp8"]


FP8, OTHER_FP8 = BlockFP8Linear(HIDDEN, 128), BlockFP8Linear(HIDDEN, 128, use_ue8m0=False)
WITHOUT_CAST = {
    "no layer": (norm(), ()),
    "float": (norm(), (Linear(HIDDEN, 8),)),
    "float and FP8": (norm(), (FP8, Linear(HIDDEN, 8))),
    "two scalings": (norm(), (FP8, OTHER_FP8)),
    "another norm": (norm(kind=type("Another", (RMSNorm,), {})), (FP8,)),
    "too wide": (norm(8320), (BlockFP8Linear(8320, 128),)),
}


@pytest.mark.parametrize(("own", "layers"), WITHOUT_CAST.values(), ids=WITHOUT_CAST)
@torch.no_grad()
def test_layers_that_share_no_cast_get_none(own, layers):
    x = torch.randn(2, len(own.weight)).to(BF16)
    total, y, cast = norm_and_cast(own, x, layers)
    assert total is x and cast is None and torch.equal(y, own(x))
    total, y, cast = norm_and_cast(own, x, layers, 2 * x)
    assert cast is None and torch.equal(total, 3 * x) and torch.equal(y, own(total))


@pytest.mark.parametrize("mlp", [small_layers.moe, small_layers.swiglu])
@torch.no_grad()
def test_a_decoder_block_has_the_bits_of_its_formula(mlp, calls):
    block, x = fuse(small_layers.decoder_block(mlp, fp8=True, dtype=BF16)), small_layers.rows(BF16)
    found, _ = block(x, *ROPE, BATCH)
    assert type(block) is FusedDecoderBlock
    # The norms of the block's input, the queries' latents, the keys' latents (no cast), and the mlp's input.
    assert calls == ["rms_norm_cast_to_fp8", "rms_norm_cast_to_fp8", "rms_norm", "add_rms_norm_cast_to_fp8"]
    y, _ = block.self_attn(block.input_layernorm(x), *ROPE, BATCH)
    h = x + y
    assert torch.equal(found, h + block.mlp(block.post_attention_layernorm(h)))


@pytest.fixture
def on_gpu(monkeypatch):
    """Make projections of bf16 streams call `dsa.hyper_mix` on a CPU too."""

    def parts_for(self, x):
        return self.fn_parts if x.dtype == BF16 else None

    monkeypatch.setattr(_FusedMixing, "parts_for", parts_for)


def hyper_blocks(count, fp8=True):
    return fuse(torch.nn.ModuleList(small_layers.hyper_block(fp8=fp8, dtype=BF16) for _ in range(count)))


def formula(block, x):
    y, *weights = block.hc_attn.collapse(x)
    x = block.hc_attn.expand(block.attn(block.attn_norm(y), ROPE, None, BATCH), x, *weights)
    y, *weights = block.hc_ffn.collapse(x)
    return block.hc_ffn.expand(block.ffn(block.ffn_norm(y)), x, *weights)


@torch.no_grad()
def test_a_hyper_block_has_the_bits_of_its_formula(calls):
    """`rms_norm_cast_to_fp8` takes the queries' latents, and `rms_norm` the keys."""
    (block,), x = hyper_blocks(1), streams(BF16)
    found, seen = run_hyper_block(block, x), Counter(calls)
    assert torch.equal(found, formula(block, x))
    expected = {"hyper_collapse_norm_cast_to_fp8": 2, "hyper_expand": 2, "rms_norm_cast_to_fp8": 1, "rms_norm": 1}
    assert seen == expected


# Layers in bf16 share no cast, so their collapse and norm are two ops.
@pytest.mark.parametrize(("fp8", "collapse"), [(True, "hyper_collapse_norm_cast_to_fp8"), (False, "hyper_collapse")])
@torch.no_grad()
def test_an_expansion_is_one_op_with_the_next_projection(fp8, collapse, on_gpu, calls):
    (first, second), x = hyper_blocks(2, fp8), streams(BF16)
    assert first.following == (second.hc_attn,) and second.following == ()
    between = run_hyper_block(first, x)
    assert isinstance(between, MixedStreams)
    found, seen = run_hyper_block(second, between), Counter(name for name in calls if name.startswith("hyper"))
    assert torch.equal(between.streams, formula(first, x))
    assert torch.equal(between.mix, second.hc_attn.project(between.streams))
    assert torch.equal(found, formula(second, between.streams))
    assert seen == {collapse: 4, "hyper_mix": 1, "hyper_expand_mix": 3, "hyper_expand": 1}


@torch.no_grad()
def test_fp16_streams_take_the_ops_one_by_one(calls):
    connection, norm, x = fuse(small_layers.hyper()), RMSNorm(HIDDEN), streams(torch.float16)
    y, cast, weights = connection.enter(MixedStreams(x, None), norm, (SwiGLU(HIDDEN, 128, fp8=True).gate_proj,))
    collapsed, *expected = connection.collapse(x)
    assert torch.equal(y, norm(collapsed)) and cast is not None
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    left = connection.leave(y, MixedStreams(x, None), weights, connection)
    assert left.mix is None and torch.equal(left.streams, connection.expand(y, x, *expected))
    assert not {"hyper_collapse_norm_cast_to_fp8", "hyper_expand_mix"} & {*calls}


def value(parts):
    return parts.double().sum(0)


def test_three_bf16_parts_add_up_to_the_fp32_matrix():
    weight = torch.randn(24, 40) * torch.logspace(-20, 20, 40)
    parts = split_in_bf16(nn.Parameter(weight))
    assert parts.dtype == torch.bfloat16 and parts.shape == (3, 24, 40) and not parts.requires_grad
    assert ((value(parts) - weight).abs() <= weight.double().abs() * 2**-24).all()


@pytest.mark.parametrize("kind", [HyperConnection, HyperHead])
@pytest.mark.parametrize("assign", [False, True])
def test_loading_a_layer_renews_its_parts_in_the_same_memory(kind, assign):
    layer, other = fuse(kind(64, 4)), kind(64, 4)
    nn.init.normal_(other.fn)
    kept = layer.fn_parts
    layer.load_state_dict(other.state_dict(), assign=assign)
    assert layer.fn_parts is kept and torch.equal(value(kept).float(), other.fn)
    assert layer.state_dict().keys() == {"fn", "base", "scale"}
    x = torch.randn(3, 4, 64).bfloat16()
    torch.testing.assert_close(dsa.hyper_mix(x, kept), layer.project(x), rtol=1e-5, atol=1e-5)
