"""Models on dsa's ops have the logits and greedy tokens of transformers' models with eager attention, in fp32."""

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from dsa_layers.hf.paged_layer import PagedLayer
from tests.layers.hf.pairs import Adapter
from tests.layers.layers.calls import record, use_multi_head_form
from tests.layers.models.parity import assert_same


@pytest.fixture(autouse=True)
def nan_in_new_memory():
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def in_chunks(model, tokens, chunks, cache):
    out = []
    for part in tokens.split(chunks, dim=1):
        out.append(model(part, cache=cache).logits)
        assert cache.get_seq_length() == sum(logits.shape[1] for logits in out)
    return torch.cat(out, 1)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("length", [1, 8, 9, 70])
def test_a_pass_over_whole_sequences_has_the_same_logits(models, tokens, length, use_cache):
    expected = models.theirs(tokens[:, :length]).logits
    assert_same(models.ours(tokens[:, :length], use_cache=use_cache).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize(
    ("chunks", "config"),
    [
        ([1] * 20 + [44] + [1] * 5, True),  # the last 5 tokens are on a second page of 64 tokens (V4's pages have 256)
        ([5, 7, 13, 1, 1, 21, 22], False),
        ([55] * 6, True),  # pages are allocated three times (in V4, once); the last two copy old pages
    ],
)
def test_chunks_over_a_cache_have_the_same_logits(models, chunks, config):
    tokens = torch.randint(0, 255, (2, sum(chunks)))
    cache = DynamicCache(config=models.ours.config) if config else DynamicCache()
    assert_same(in_chunks(models.ours, tokens, chunks, cache), models.theirs(tokens).logits)
    assert all(isinstance(layer, PagedLayer) for layer in cache.layers)


@torch.no_grad()
def test_the_form_of_attention_that_a_gpu_takes_has_the_same_logits(models, tokens, monkeypatch):
    """All but the 1-token chunk use the multi-head form. The first has no bits: its 6 tokens attend to all keys."""
    if models.ours.config.model_type == "deepseek_v4":
        return  # V4's attention has no multi-head form
    selected = record(monkeypatch, "mha_varlen_fwd", seen=lambda *_, selected, **__: selected)
    use_multi_head_form(monkeypatch)
    got = in_chunks(models.ours, tokens, [6, 30, 1, 33], DynamicCache(config=models.ours.config))
    assert_same(got, models.theirs(tokens).logits)
    layers = models.ours.config.num_hidden_layers
    assert len(selected) == 3 * layers
    assert all(bits is None for bits in selected[:layers]) and all(bits is not None for bits in selected[layers:])


@pytest.mark.parametrize("options", [{}, {"num_return_sequences": 2, "num_beams": 2}])
def test_greedy_tokens_are_the_same(models, tokens, options):
    arguments = {"max_new_tokens": 16, "do_sample": False, "attention_mask": torch.ones_like(tokens[:2, :20])}
    expected = models.theirs.generate(tokens[:2, :20], **arguments, **options)
    assert torch.equal(models.ours.generate(tokens[:2, :20], **arguments, **options), expected)
    assert len(expected[:, 20:].unique()) > 4


def linear_layers(model):
    """Return {name of a linear layer in attention: [(attention, linear layer) per decoder layer that has it]}."""
    found = {}
    for layer in model.model.layers:
        for name, module in layer.self_attn.named_modules():
            if type(module) is nn.Linear:
                found.setdefault(name, []).append((layer.self_attn, module))
    return found


def with_adapters(model, name):
    torch.manual_seed(0)
    model = copy.deepcopy(model)
    for self_attn, linear in linear_layers(model)[name]:
        self_attn.set_submodule(name, Adapter(linear, 0.3))
    return model


def with_hooks(model, name):
    model = copy.deepcopy(model)
    for _, linear in linear_layers(model)[name]:
        linear.register_forward_hook(lambda module, inputs, output: output.roll(1, -1))
    return model


@torch.no_grad()
@pytest.mark.parametrize(("changed", "names"), [(with_adapters, ("",)), (with_hooks, ("kv_b_proj", "weights_proj"))])
def test_adapters_and_hooks_of_linear_layers_take_effect(models, tokens, changed, names):
    plain = models.theirs(tokens).logits
    assert any(name.endswith("weights_proj") for name in linear_layers(models.theirs))
    for name in linear_layers(models.theirs):
        if name.endswith(names):
            expected = changed(models.theirs, name)(tokens).logits
            assert (expected - plain).abs().max() > 0.05, name
            assert_same(changed(models.ours, name)(tokens).logits, expected)


def test_an_adapter_of_fp32_weights_takes_inputs_of_another_dtype(models):
    """The indexer's weights_proj is an example: transformers keeps it in fp32 in models of other dtypes too."""
    torch.manual_seed(0)
    indexers = [module for module in models.ours.modules() if hasattr(module, "index_topk")]
    indexer, x = copy.deepcopy(indexers[0]), torch.randn(9, 64, dtype=torch.bfloat16)
    owner = indexer.scorer if hasattr(indexer, "scorer") else indexer
    owner.weights_proj = Adapter(owner.weights_proj, 1.0)
    expected = owner.weights_proj(x.float()) * (indexer.n_heads * indexer.head_dim) ** -0.5
    assert torch.equal(indexer.head_weights(x), expected)
