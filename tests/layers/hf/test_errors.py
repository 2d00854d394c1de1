"""Wrong arguments and caches raise one-line errors. Reordered and reset caches."""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.layers.hf.pairs import padded
from tests.layers.models.parity import assert_same


def refused(match, call, *arguments, **options):
    with torch.no_grad(), pytest.raises((ValueError, NotImplementedError), match=match) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)


def cache_after(model, *arguments):
    with torch.no_grad():
        return model(*arguments, use_cache=True).cache


def test_masks_of_other_shapes_and_attention_weights_are_refused(models, tokens):
    refused("output_attentions: must be False", models.ours, tokens, output_attentions=True)
    for shape, message in (
        ((3, 1, 70, 70), r"attention_mask: must be \[batch, tokens\]"),
        ((3, 71), "attention_mask: must have a column for each of 0 earlier and 70 new"),
        ((2, 70), r"attention_mask: must be \[3, tokens\].*got shape \[2, 70\]"),
    ):
        refused(message, models.ours, tokens, torch.ones(shape))


def test_masks_that_contradict_the_cache_are_refused(models, tokens):
    ids, mask = padded(tokens, [48, 5, 23], "left")
    cache = cache_after(models.ours, ids, mask)
    for message, batch_size, mask in (
        ("attention_mask: is needed after a pass with padding, got None", 3, None),
        ("attention_mask: must show the earlier tokens", 3, torch.ones(3, 49)),
        ("attention_mask: must have a column for each of 48", 3, torch.ones(3, 48)),
        ("cache: holds 3 sequences, got a batch of 2", 2, torch.ones(2, 49)),
    ):
        refused(message, models.ours, tokens[:batch_size, :1], mask, cache=cache)


def test_caches_that_are_not_dynamic_or_hold_other_layers_tokens_are_refused(models, tokens):
    if models.ours.config.model_type != "deepseek_v4":  # transformers has no static cache for V4
        static = StaticCache(config=models.ours.config, max_cache_len=80)
        refused("cache: must be a DynamicCache.*got StaticCache", models.ours, tokens, cache=static)
        generate = {"max_new_tokens": 2, "cache_implementation": "static"}
        refused("cache_implementation is not set, got StaticCache", models.ours.generate, tokens[:, :9], **generate)
    offloaded = DynamicCache(config=models.ours.config)
    offloaded.offloading = True
    refused("got DynamicCache with offloading", models.ours, tokens, cache=offloaded)
    theirs, ours = (cache_after(model, tokens) for model in (models.theirs, models.ours))
    refused("cache: layer 0 holds 70 tokens of transformers' own", models.ours, tokens, cache=theirs)
    refused("which other layers cannot fill", models.theirs, tokens, cache=ours)


def test_generation_that_takes_tokens_back_is_refused(models, tokens):
    ids = {"inputs": tokens[:1, :20], "max_new_tokens": 12, "do_sample": False}
    stateful = models.ours.config.model_type == "deepseek_v4"
    message = "not supported with stateful models" if stateful else "requires a cache that can be cropped"
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": copy.deepcopy(models.theirs)}):
        refused(message, models.ours.generate, **ids, **options)


def test_offloaded_weights_are_refused(models, tokens):
    model = copy.deepcopy(models.ours)
    model.model.layers[1].self_attn.to("meta")
    for use_cache in (True, False):
        refused("device_map: weights that are offloaded.*got none of layer 1", model, tokens, use_cache=use_cache)


def test_other_implementations_of_attention_are_refused(models, tokens):
    model = copy.deepcopy(models.ours)
    model.config._attn_implementation = "eager"
    refused("attn_implementation 'dsa'; got .* with 'eager'", model, tokens)
    model = copy.deepcopy(models.theirs)
    model.config._attn_implementation = "dsa"
    with pytest.raises((ValueError, KeyError), match="dsa"):
        model(tokens)


def test_positions_of_compressed_tokens_must_be_consecutive(models, tokens):
    positions = torch.arange(70)[None] * 2
    mask = torch.ones_like(tokens)
    if models.ours.config.model_type == "deepseek_v4":
        refused("position_ids: must be consecutive", models.ours, tokens, mask, positions)
    else:
        with torch.no_grad():
            assert_same(models.ours(tokens, mask, positions).logits, models.theirs(tokens, mask, positions).logits)


@torch.no_grad()
def test_reordered_sequences_go_on_and_a_reset_cache_is_empty(models, tokens):
    cache = cache_after(models.ours, tokens[:, :30])
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    got = models.ours(tokens[[2, 0, 2], 30:31], cache=cache).logits
    assert_same(got[:, 0], models.theirs(tokens[[2, 0, 2], :31]).logits[:, -1])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_same(models.ours(tokens, cache=cache).logits, models.theirs(tokens).logits)
