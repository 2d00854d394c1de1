"""Blocks over residual streams: the bits of their formula, whatever stands together in one kernel, and what is left
alone where others are to see what goes in and comes out."""

from collections import Counter

import pytest
import torch

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.io.loading import load_model
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.hyper_connections import HyperConnection, _Mixing
from dsa_layers.layers.hyper_decoder import HyperDecoderBlock, following
from dsa_layers.layers.hyper_sublayer import MixedStreams, enter, leave
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SwiGLU
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.layers.rope import RotaryEmbedding, rope_frequencies
from tests.layers.families.v4_checkpoints import write_published
from tests.layers.layers.calls import record

HIDDEN, TOKENS = 256, 9


@pytest.fixture
def calls(monkeypatch):
    """Names of the ops that are called, once each time."""
    hyper = ("hyper_collapse", "hyper_collapse_norm_cast_to_fp8", "hyper_expand", "hyper_expand_mix", "hyper_mix")
    return record(monkeypatch, *hyper, "per_token_cast_to_fp8", "rms_norm_cast_to_fp8")


@pytest.fixture
def on_gpu(monkeypatch):
    """Projections are of the bf16 parts, as on a GPU."""

    def parts_for(self, x):
        return self._fn_parts.of(self.fn) if x.dtype == torch.bfloat16 and not torch.is_grad_enabled() else None

    monkeypatch.setattr(_Mixing, "parts_for", parts_for)


class Tokenless(MoE):
    """Experts by a router that knows no tokens."""

    def forward(self, x, tokens=None, *, cast=None):
        return super().forward(x, cast=cast)


def block(fp8=True):
    options = {"fp8": fp8, "dtype": torch.bfloat16}
    ranks = {"q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 128}
    attention = CompressedAttention(HIDDEN, 2, dim=512, window=4, **ranks, **options)
    experts = Tokenless(HIDDEN, 128, GroupedSigmoidRouter(HIDDEN, 4, 2, dtype=torch.bfloat16), **options)
    mixing = {name: HyperConnection(HIDDEN, 4) for name in ("hc_attn", "hc_ffn")}
    for parameter in (p for each in mixing.values() for p in each.parameters()):
        torch.nn.init.normal_(parameter, std=0.1)
    model = HyperDecoderBlock(HIDDEN, attention, experts, **mixing)
    for norm in (model.attn_norm, model.ffn_norm):
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    return model


def streams():
    return torch.randn(TOKENS, 4, HIDDEN).bfloat16()


def surroundings():
    batch = SequenceBatch.without_cache([TOKENS])
    rope = RotaryEmbedding(rope_frequencies(64, 1e4))(batch.positions)
    return torch.zeros(TOKENS, dtype=torch.int64), rope, None, batch


def formula(model, x):
    """The block's, function by function."""
    _, *rest = surroundings()
    y, *weights = model.hc_attn.collapse(x)
    x = model.hc_attn.expand(model.attn(model.attn_norm(y), *rest), x, *weights)
    y, *weights = model.hc_ffn.collapse(x)
    return model.hc_ffn.expand(model.ffn(model.ffn_norm(y)), x, *weights)


@torch.no_grad()
def test_a_block_is_its_formula(calls):
    """Collapse, norm and cast are one, twice; the queries' latents are normed and cast at once."""
    model, x = block(), streams()
    found, seen = model(x, *surroundings()), sorted(calls)
    assert torch.equal(found, formula(model, x))
    assert seen == 2 * ["hyper_collapse_norm_cast_to_fp8"] + 2 * ["hyper_expand"] + ["rms_norm_cast_to_fp8"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("fp8", "counts"),
    [
        (True, {"hyper_collapse_norm_cast_to_fp8": 4, "hyper_mix": 1, "hyper_expand_mix": 3, "hyper_expand": 1}),
        # There is no cast to share, so collapse and norm go by themselves.
        (False, {"hyper_collapse": 4, "hyper_mix": 1, "hyper_expand_mix": 3, "hyper_expand": 1}),
    ],
)
def test_blocks_with_projections_of_parts(fp8, counts, on_gpu, calls):
    """The expansion comes with the projection of the next sublayer: within a block, and from block to block."""
    blocks, x = torch.nn.ModuleList(block(fp8) for _ in range(2)), streams()
    between = blocks[0](x, *surroundings(), **following(blocks, 0))
    assert isinstance(between, MixedStreams)
    found, seen = blocks[1](between, *surroundings(), **following(blocks, 1)), Counter(calls)
    assert torch.equal(between.streams, formula(blocks[0], x))
    assert torch.equal(between.mix, blocks[1].hc_attn.project(between.streams))
    assert torch.equal(found, formula(blocks[1], between.streams))
    assert {name: count for name, count in seen.items() if name.startswith("hyper")} == counts


def test_gradients_are_the_formulas(on_gpu, calls):
    model, x = block(fp8=False), streams().requires_grad_()
    found = model(x, *surroundings(), following=block().hc_attn)
    assert isinstance(found, torch.Tensor) and torch.equal(found, formula(model, x))
    found.float().sum().backward()
    assert x.grad.any() and all(p.grad.any() for p in model.hc_attn.parameters())
    assert not {"hyper_collapse_norm_cast_to_fp8", "hyper_expand_mix"} & {*calls}


class Flipped(HyperConnection):
    def collapse(self, x):
        x, post, comb = super().collapse(x)
        return x.flip(0), post, comb


@torch.no_grad()
@pytest.mark.parametrize("replaced", ["class", "collapse", "expand", "project"])
def test_a_block_calls_the_methods_of_a_custom_hyper_connection(replaced, on_gpu):
    """A HyperConnection subclass, or one with replaced methods, is never passed over for the fused kernels."""
    model, x = block(), streams()
    plain, hc = formula(model, x), model.hc_ffn
    if replaced == "class":
        hc.__class__ = Flipped
    else:
        whole = getattr(hc, replaced)
        setattr(hc, replaced, lambda x, *given: whole(x.flip(0), *given))
    expected = formula(model, x)
    for given in ({}, {"following": block().hc_attn}):
        assert torch.equal(model(x, *surroundings(), **given), expected)
    assert not torch.equal(plain, expected)


@torch.no_grad()
@pytest.mark.parametrize("part", ["attn_norm", "attn", "ffn_norm", "ffn"])
def test_hooks_see_what_goes_in_and_comes_out(part, on_gpu):
    model, x = block(), streams()
    module, seen = model.get_submodule(part), []
    handles = [
        module.register_forward_pre_hook(lambda module, given: (given[0].flip(0), *given[1:])),
        module.register_forward_hook(lambda module, given, y: seen.append(y) or -y),
    ]
    hooked = model(x, *surroundings())
    assert torch.equal(hooked, formula(model, x)) and torch.equal(seen[0], seen[1])
    for handle in handles:
        handle.remove()
    assert not torch.equal(hooked, model(x, *surroundings()))


class Another(HyperDecoderBlock):
    def forward(self, streams, tokens, rope, entry_rope, batch, cache=None, rows=None):
        return super().forward(streams, tokens, rope, entry_rope, batch, cache)


def test_a_block_is_told_of_the_next_one():
    blocks = [block() for _ in range(2)]
    assert following(blocks, 0) == {"following": blocks[1].hc_attn} and following(blocks, 1) == {}


@pytest.mark.parametrize(
    "replaced",
    [
        lambda block: block.register_forward_hook(lambda module, given, y: None),
        lambda block: block.register_forward_pre_hook(lambda module, given: None),
        lambda block: setattr(block, "forward", block.forward),
        lambda block: setattr(block, "__class__", Another),
    ],
    ids=["hook", "pre-hook", "forward", "class"],
)
def test_a_block_is_not_told_of_one_whose_input_others_see(replaced):
    blocks = [block() for _ in range(3)]
    replaced(blocks[1])
    assert following(blocks, 0) == following(blocks, 1) == {}
    blocks[1] = torch.nn.Identity()
    assert following(blocks, 0) == following(blocks, 1) == {}


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_block():
    model, x = block(), streams()
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(x, *surroundings()), model(x, *surroundings()))


@torch.no_grad()
def test_dtypes_without_kernels(calls):
    """Streams of fp16: the functions by themselves."""
    hc, norm, layer, x = HyperConnection(HIDDEN, 4), RMSNorm(HIDDEN), SwiGLU(HIDDEN, 128, fp8=True), streams().half()
    y, cast, weights = enter(hc, x, norm, layer)
    collapsed, *expected = hc.collapse(x)
    assert torch.equal(y, norm(collapsed)) and cast is not None
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    assert torch.equal(leave(hc, y, x, weights, hc), hc.expand(y, x, *expected))
    assert not {"hyper_collapse_norm_cast_to_fp8", "hyper_expand_mix"} & {*calls}


@torch.no_grad()
def test_a_model(tmp_path, on_gpu, calls, monkeypatch):
    """The logits of a pass are those of layers that know nothing of each other."""
    write_published(tmp_path)
    model = load_model(tmp_path, progress=False)
    tokens, batch = torch.arange(40), SequenceBatch.without_cache([40])
    found, seen = model(tokens, batch, all_tokens=True), list(calls)
    layers = len(model.layers)
    assert seen.count("hyper_expand_mix") == 2 * layers - 1 and seen.count("hyper_expand") == 1
    assert seen.count("hyper_mix") == 2  # of the first layer, and of the head
    monkeypatch.setattr("dsa_layers.layers.hyper_sublayer._is_plain", lambda hc: False)
    calls.clear()
    assert torch.equal(model(tokens, batch, all_tokens=True), found)
    assert calls.count("hyper_expand") == calls.count("hyper_collapse") == 2 * layers
