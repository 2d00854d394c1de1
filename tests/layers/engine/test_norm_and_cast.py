"""Blocks whose norms give the casts that their layers read: the bits of the formula, and what is computed once."""

import pytest
import torch

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.layers.attention import DSAAttention
from dsa_layers.layers.decoder import DecoderBlock
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.linear import BlockFP8Linear, Linear
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE, SwiGLU
from dsa_layers.layers.norm import RMSNorm
from dsa_layers.engine.norm_and_cast import norm_and_cast
from dsa_layers.layers.rope import RotaryEmbedding, rope_frequencies
from tests.layers.layers.calls import record

HIDDEN = 256


@pytest.fixture
def calls(monkeypatch):
    """Names of the ops that are called."""
    norms = "rms_norm", "rms_norm_cast_to_fp8", "add_rms_norm_cast_to_fp8"
    return record(monkeypatch, *norms, "per_token_cast_to_fp8", "fp8_gemm_nt")


def norm(channels=HIDDEN):
    made = RMSNorm(channels)
    torch.nn.init.uniform_(made.weight, 0.5, 1.5)
    return made


def rows(tokens=5, channels=HIDDEN):
    return torch.randn(tokens, channels).bfloat16()


@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_has_the_bits_of_its_parts(use_ue8m0, calls):
    layer, own, x, residual = BlockFP8Linear(HIDDEN, 128, use_ue8m0=use_ue8m0), norm(), rows(), rows()
    with torch.no_grad():
        for h, (total, y, cast) in (
            (x, norm_and_cast(own, x, (layer,))),
            (residual + x, norm_and_cast(own, x, (layer,), residual)),
        ):
            assert torch.equal(total, h) and torch.equal(y, own(h))
            q, scale = layer.cast(y)
            assert torch.equal(cast[0].view(torch.int8), q.view(torch.int8)) and torch.equal(cast[1], scale)
    assert calls[:2] == ["rms_norm_cast_to_fp8", "add_rms_norm_cast_to_fp8"]


class Another(RMSNorm):
    def forward(self, x):
        return super().forward(x) + 1


def test_where_there_is_no_cast():
    """Layers that share none, gradients, and norms whose call is more than the formula."""
    fp8, x, residual = BlockFP8Linear(HIDDEN, 128), rows(), rows()
    other, hooked, wide = BlockFP8Linear(HIDDEN, 128, use_ue8m0=False), norm(), BlockFP8Linear(8320, 128)
    hooked.register_forward_hook(lambda module, given, y: y + 1)
    subclass = Another(HIDDEN)
    for own, layers, given in [
        (norm(), (), x),
        (norm(), (Linear(HIDDEN, 8),), x),
        (norm(), (fp8, Linear(HIDDEN, 8)), x),
        (norm(), (fp8, other), x),
        (hooked, (fp8,), x),
        (subclass, (fp8,), x),
        (norm(8320), (wide,), rows(2, 8320)),
    ]:
        with torch.no_grad():
            total, y, cast = norm_and_cast(own, given, layers)
            assert total is given and cast is None and torch.equal(y, own(given))
    total, y, cast = norm_and_cast(norm(), x, (fp8,), residual)
    assert torch.equal(total, residual + x) and y.requires_grad and cast is None


def block(mlp, fp8=True):
    options = {"fp8": fp8, "dtype": torch.bfloat16}
    indexer = LightningIndexer(HIDDEN, 128, n_heads=2, head_dim=128, top_k=4, **options)
    sizes = {"q_lora_rank": 128, "kv_lora_rank": 128, "nope_dim": 128, "rope_dim": 64, "v_dim": 128}
    return DecoderBlock(HIDDEN, PagedAttention(HIDDEN, 2, indexer, **sizes, **options), mlp(options))


def experts(options):
    router = GroupedSigmoidRouter(HIDDEN, 4, 2, dtype=torch.bfloat16)
    return MoE(HIDDEN, 128, router, **options)


def dense(options):
    return SwiGLU(HIDDEN, 256, **options)


@torch.no_grad()
def run(model, x):
    """(what the block gives, its formula)."""
    batch = SequenceBatch.without_cache([len(x)])
    angles = RotaryEmbedding(rope_frequencies(64, 1e4))(batch.positions)
    found = model(x, *angles, batch)
    h = x + model.self_attn(model.input_layernorm(x), *angles, batch)
    return found, h + model.mlp(model.post_attention_layernorm(h))


@pytest.mark.parametrize("mlp", [experts, dense])
def test_a_block_is_its_formula(mlp, calls):
    found, expected = run(block(mlp), rows(9))
    assert torch.equal(found, expected)
    # Twice the queries' latents, and the block's input; the latents of keys are not cast for products.
    assert calls.count("rms_norm_cast_to_fp8") == 3 and calls.count("add_rms_norm_cast_to_fp8") == 1


class Doubled(torch.nn.Module):
    """A module that names no layers gets its input alone."""

    def forward(self, x):
        return 2 * x


class NegativeAttention(PagedAttention):
    def forward(self, x, cos, sin, batch, cache=None, selection=None):
        return -super().forward(x, cos, sin, batch, cache, selection)


class DoubledExperts(MoE):
    def forward(self, x):
        return 2 * super().forward(x)


def replace_module(model):
    model.mlp = Doubled()


def replace_classes(model):
    model.self_attn.__class__, model.mlp.__class__ = NegativeAttention, DoubledExperts


def replace_forward(model):
    whole = model.mlp.forward
    model.mlp.forward = lambda x: 3 * whole(x)


@pytest.mark.parametrize("replace", [replace_module, replace_classes, replace_forward])
def test_a_block_is_the_formula_of_what_replaces_its_parts(replace):
    model = block(experts)
    replace(model)
    found, expected = run(model, rows(9))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("part", ["self_attn", "mlp", "mlp.shared_experts", "mlp.experts"])
def test_hooks_see_what_goes_in_and_comes_out(part):
    """A hook may change the input, of which a cast would then be another's, or the output, in which no residual is."""
    model, x, seen = block(experts), rows(9), []
    module = model.get_submodule(part)
    handles = [
        module.register_forward_pre_hook(lambda module, given: (given[0].flip(0), *given[1:])),
        module.register_forward_hook(lambda module, given, y: seen.append(y) or 0 * y),
    ]
    hooked, expected = run(model, x)
    assert torch.equal(hooked, expected)
    assert torch.equal(*seen), "another output in the block than in its formula"
    for handle in handles:
        handle.remove()
    assert not torch.equal(run(model, x)[0], hooked)


@pytest.mark.slow
def test_a_compiled_block_is_its_formula():
    """Without gradients: what decides on casts and shared products is not traced."""
    model, x = block(dense), rows(9)
    expected, _ = run(model, x)
    model.self_attn.__class__ = DSAAttention
    assert torch.equal(run(torch.compile(model, backend="eager"), x)[0], expected)
