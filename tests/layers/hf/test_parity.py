"""Models on dsa's ops against transformers' own, eager, in fp32: logits and greedy tokens."""

import pytest
import torch
from transformers import DynamicCache

import dsa
from dsa_layers.hf.paged_layer import PagedLayer
from dsa_layers.layers import attention
from tests.layers.hf.pairs import MINOR, assert_same

pytestmark = pytest.mark.usefixtures("nan_in_new_memory")


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("length", [1, 4, 8, 9, 17, 70])
def test_full_pass(models, tokens, length, use_cache):
    expected = models.theirs(tokens[:, :length]).logits
    assert_same(models.ours(tokens[:, :length], use_cache=use_cache).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("chunks", [[1] * 70, [5, 7, 13, 1, 1, 21, 22], [64, 1, 1, 1, 1, 1, 1], [8, 1, 61]])
def test_chunks_over_a_cache(models, tokens, chunks, config):
    """Lengths beyond a page of 64 tokens, so that pages are added."""
    cache = DynamicCache(config=models.ours.config) if config else DynamicCache()
    out, done = [], 0
    for n in chunks:
        out.append(models.ours(tokens[:, done : done + n], past_key_values=cache).logits)
        done += n
        assert cache.get_seq_length() == done
    assert_same(torch.cat(out, 1), models.theirs(tokens).logits)
    assert all(isinstance(layer, PagedLayer) for layer in cache.layers)


@torch.no_grad()
def test_the_form_of_attention_that_a_gpu_takes(models, tokens, monkeypatch):
    """Prompts over every head's keys and values, with a bit for each selected key, by the op's reference."""
    if models.ours.config.model_type == "deepseek_v4":
        return  # which has one form
    selected, attend = [], dsa.mha_varlen_fwd

    def noted(*arguments, **options):
        selected.append(options["selected"])
        return attend(*arguments, **options)

    monkeypatch.setattr(dsa, "mha_varlen_fwd", noted)
    monkeypatch.setattr(attention, "multi_head_is_faster", lambda *_: True)
    monkeypatch.setattr(attention.DSAAttention, "_has_multi_head_kernel", lambda *_: not torch.is_grad_enabled())
    cache, out = DynamicCache(config=models.ours.config), []
    for part in tokens.split([6, 30, 1, 33], dim=1):
        out.append(models.ours(part, past_key_values=cache).logits)
    assert_same(torch.cat(out, 1), models.theirs(tokens).logits)
    layers = models.ours.config.num_hidden_layers
    assert len(selected) == 3 * layers
    assert all(bits is None for bits in selected[:layers]) and all(bits is not None for bits in selected[layers:])


@torch.no_grad()
def test_pages_grow(models):
    """Many pages more than at first: three growths, each of which moves what is there."""
    tokens = torch.randint(0, 255, (2, 330))
    cache, out = DynamicCache(config=models.ours.config), []
    for part in tokens.split(55, dim=1):
        out.append(models.ours(part, past_key_values=cache).logits)
    assert_same(torch.cat(out, 1), models.theirs(tokens).logits)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_return_sequences": 2, "num_beams": 2}])
def test_greedy_tokens(models, tokens, options):
    if models.ours.config.model_type == "deepseek_v4" and options and MINOR < 23:
        pytest.skip("transformers reorders no compressed tokens in this version")
    arguments = {"max_new_tokens": 24, "do_sample": False, "attention_mask": torch.ones_like(tokens[:2, :20])}
    expected = models.theirs.generate(tokens[:2, :20], **arguments, **options)
    assert torch.equal(models.ours.generate(tokens[:2, :20], **arguments, **options), expected)
    assert len(expected[:, 20:].unique()) > 4


@torch.no_grad()
def test_embeddings_in_the_place_of_tokens(models, tokens):
    embeddings = models.ours.get_input_embeddings()(tokens)
    if models.ours.config.model_type == "deepseek_v4":
        return  # some of its experts are chosen by tokens
    assert_same(models.ours(inputs_embeds=embeddings).logits, models.theirs(tokens).logits)


@torch.no_grad()
def test_hidden_states_are_transformers(models, tokens):
    got = models.ours(tokens, output_hidden_states=True).hidden_states
    expected = models.theirs(tokens, output_hidden_states=True).hidden_states
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected):
        assert (ours - theirs).abs().max() < 2e-5 * theirs.abs().max().clamp(min=1)


@torch.no_grad()
def test_selection_matters(models, tokens):
    """What these tests rest on: with more keys the logits would be others."""
    expected = models.theirs(tokens).logits
    indexers = [module for module in models.ours.modules() if hasattr(module, "index_topk")]
    for indexer in indexers:
        indexer.index_topk, indexer.kept = 64, indexer.index_topk
    got = models.ours(tokens).logits
    for indexer in indexers:
        indexer.index_topk = indexer.kept
    assert (got - expected)[:, 40:].abs().max() > 0.05
