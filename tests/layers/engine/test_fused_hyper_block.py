"""Fused blocks over residual streams: the bits of their formula, in few kernels."""

from collections import Counter

import pytest
import torch

from dsa_layers.engine.fuse import fuse
from dsa_layers.engine.fused_hyper_block import MixedStreams, _FusedMixing
from dsa_layers.layers.moe import SwiGLU
from dsa_layers.layers.norm import RMSNorm
from tests.layers.layers import small_layers
from tests.layers.layers.calls import record
from tests.layers.layers.small_layers import BATCH, HIDDEN, ROPE, run_hyper_block, streams

BF16 = torch.bfloat16


@pytest.fixture
def calls(monkeypatch):
    """Names of the called ops."""
    hyper = ("hyper_collapse", "hyper_collapse_norm_cast_to_fp8", "hyper_expand", "hyper_expand_mix", "hyper_mix")
    return record(monkeypatch, *hyper, "rms_norm_cast_to_fp8")


@pytest.fixture
def on_gpu(monkeypatch):
    """Projections are `dsa.hyper_mix` of bf16 parts, as on a GPU."""

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
def test_a_block_has_the_bits_of_its_formula(calls):
    """Collapse, norm and cast are one op. The queries' latents are normed and cast at once."""
    (block,), x = hyper_blocks(1), streams(BF16)
    found, seen = run_hyper_block(block, x), sorted(calls)
    assert torch.equal(found, formula(block, x))
    assert seen == 2 * ["hyper_collapse_norm_cast_to_fp8"] + 2 * ["hyper_expand"] + ["rms_norm_cast_to_fp8"]


# Layers in bf16 share no cast, so their collapse and norm are two ops.
@pytest.mark.parametrize(("fp8", "collapse"), [(True, "hyper_collapse_norm_cast_to_fp8"), (False, "hyper_collapse")])
@torch.no_grad()
def test_an_expansion_is_one_op_with_the_next_projection(fp8, collapse, on_gpu, calls):
    """Within a block, and from one block to the next."""
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
