"""What these layers do not take is refused in one line that names the argument, and a cache's interface."""

import copy

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

from dsa_layers.batch.rows import ALL_ROWS
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.hf import lengths
from dsa_layers.hf.paged_layer import CACHE, PagedLayer, Storage
from dsa_layers.layers.selection import Selection
from tests.layers.hf.pairs import MINOR, assert_same, padded, pair


def refused(match, call, *arguments, **options):
    with torch.no_grad(), pytest.raises((ValueError, NotImplementedError), match=match) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)


def test_masks_and_attentions(models, tokens):
    refused("output_attentions: must be False", models.ours, tokens, output_attentions=True)
    for shape, message in (
        ((3, 1, 70, 70), r"attention_mask: must be \[batch, tokens\]"),
        ((3, 71), "attention_mask: must have a column for each of 0 earlier and 70 new"),
        ((2, 70), r"attention_mask: must be \[3, tokens\].*got shape \[2, 70\]"),
    ):
        refused(message, models.ours, tokens, torch.ones(shape))


def test_masks_over_a_cache(models, tokens):
    ids, mask = padded(tokens, [48, 5, 23], "left")
    with torch.no_grad():
        cache = models.ours(ids, attention_mask=mask, use_cache=True)[CACHE]
    more = {"input_ids": tokens[:, :1], CACHE: cache}
    refused("attention_mask: is needed after a pass with padding, got None", models.ours, **more)
    refused("attention_mask: must show the earlier tokens", models.ours, attention_mask=torch.ones(3, 49), **more)
    refused("attention_mask: must have a column for each of 48", models.ours, attention_mask=torch.ones(3, 48), **more)
    refused(
        f"{CACHE}: holds 3 sequences, got a batch of 2",
        *(models.ours, tokens[:2, :1]),
        **{CACHE: cache},
        attention_mask=torch.ones(2, 49),
    )


def test_static_caches(models, tokens):
    """transformers has none for DeepSeek-V4."""
    if models.ours.config.model_type == "deepseek_v4":
        return
    static = StaticCache(config=models.ours.config, max_cache_len=80)
    refused(f"{CACHE}: must be a DynamicCache.*got StaticCache", models.ours, tokens, **{CACHE: static})
    generate = {"max_new_tokens": 2, "cache_implementation": "static"}
    refused("cache_implementation is not set, got StaticCache", models.ours.generate, tokens[:, :9], **generate)


@pytest.mark.skipif(MINOR < 24, reason="what earlier versions of transformers say was not looked up")
def test_continuous_batching(models):
    """transformers' own layers of these models cannot do it either."""
    for model in (models.ours, models.theirs):
        with pytest.raises(ValueError, match=r"not supported for continuous batching|Invalid layer type"):
            copy.deepcopy(model).generate_batch([[1, 2, 3]], progress_bar=False)


def test_other_caches(models, tokens):
    offloaded = DynamicCache(config=models.ours.config)
    offloaded.offloading = True
    refused("got DynamicCache with offloading", models.ours, tokens, **{CACHE: offloaded})
    with torch.no_grad():
        theirs, ours = (model(tokens, use_cache=True)[CACHE] for model in (models.theirs, models.ours))
    message = f"{CACHE}: layer 0 holds 70 tokens of transformers' own"
    refused(message, models.ours, tokens, **{CACHE: theirs})
    refused("which other layers cannot fill", models.theirs, tokens, **{CACHE: ours})


def test_kinds_of_generation(models, tokens):
    ids = {"inputs": tokens[:1, :20], "max_new_tokens": 12, "do_sample": False}
    message = rf"{CACHE}: .* forget no tokens, .* assistant_model"
    if models.ours.config.model_type == "deepseek_v4":
        message = "not supported with stateful models"
    elif MINOR >= 24:
        message = "requires a cache that can be cropped"
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": copy.deepcopy(models.theirs)}):
        refused(message, models.ours.generate, **ids, **options)
    if torch.version.cuda is None or torch.cuda.is_available():  # transformers makes a stream of the GPU
        refused("got DynamicCache with offloading", models.ours.generate, **ids, cache_implementation="offloaded")


def test_offloaded_weights(models, tokens):
    message = "device_map: weights that are offloaded to the CPU or a disk are not served.*got none of layer"
    model = copy.deepcopy(models.ours)
    model.model.layers[1].self_attn.to("meta")
    for use_cache in (True, False):
        refused(f"{message} 1 in memory", model, tokens, use_cache=use_cache)


READ_DIRECTLY = {  # modules whose parameters are read without a call
    "deepseek_v4": ("kv_norm", "compressor", "compressor.kv_norm", "compressor.indexer", "compressor.indexer.kv_norm")
}


def test_weights_that_a_call_of_their_module_loads(models, tokens):
    """As the `accelerate` library offloads them: on meta, and in memory while their module's `forward` runs."""
    for name in READ_DIRECTLY.get(models.ours.config.model_type, ("kv_a_layernorm", "indexer.k_norm")):
        model = copy.deepcopy(models.ours)
        found = [dict(layer.self_attn.named_modules()).get(name) for layer in model.model.layers]
        assert any(found), name
        for module in filter(None, found):
            offload(module)
        refused("device_map: weights that are offloaded.*got none of layer . in memory", model, tokens)


def offload(module):
    in_memory, call = dict(module.named_parameters(recurse=False)), module.forward
    on_meta = {name: nn.Parameter(weight.to("meta"), requires_grad=False) for name, weight in in_memory.items()}

    def forward(*arguments, **options):
        module._parameters.update(in_memory)
        result = call(*arguments, **options)
        module._parameters.update(on_meta)
        return result

    module.forward = forward
    module._parameters.update(on_meta)


def test_other_implementations_of_attention(models, tokens):
    model = copy.deepcopy(models.ours)
    model.config._attn_implementation = "eager"
    refused("attn_implementation 'dsa'; got .* with 'eager'", model, tokens)
    model = copy.deepcopy(models.theirs)
    model.config._attn_implementation = "dsa"
    refused(r"attn_implementation: 'dsa' is for the layers of dsa_layers.hf", model, tokens)


def test_positions(models, tokens):
    """Of compressed tokens, positions go on; of others they are for rope alone."""
    positions = torch.arange(70).where(torch.arange(70) < 40, torch.arange(70) + 3)[None]
    mask = torch.ones_like(tokens)
    if models.ours.config.model_type == "deepseek_v4":
        refused("position_ids: must be consecutive", models.ours, tokens, mask, positions)
        cache = DynamicCache(config=models.ours.config)
        with torch.no_grad():
            models.ours(tokens[:, :10], **{CACHE: cache})
        refused("position_ids: must be at least 0", models.ours, tokens, None, torch.arange(-3, 67)[None])
        late = {CACHE: cache, "position_ids": torch.tensor([[12]])}
        refused("position_ids: must be consecutive", models.ours, tokens[:, 10:11], **late)
    else:
        with torch.no_grad():
            got, expected = (m(tokens, mask, positions).logits for m in (models.ours, models.theirs))
        assert_same(got, expected)


@torch.no_grad()
def test_what_a_cache_does_with_sequences(models, tokens):
    """Reordered, repeated and selected sequences go on as those that they are."""
    cache = models.ours(tokens[:, :30], use_cache=True)[CACHE]
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([True, False, False, True, True, False]))
    got = models.ours(tokens[[2, 0, 1], 30:31], **{CACHE: cache}).logits
    assert_same(got[:, 0], models.theirs(tokens[[2, 0, 1], :31]).logits[:, -1])
    cache.reset()
    assert cache.get_seq_length() == 0
    assert_same(models.ours(tokens, **{CACHE: cache}).logits, models.theirs(tokens).logits)
    with pytest.raises(NotImplementedError, match=rf"{CACHE}: .* forget no tokens"):
        cache.crop(-1)


def test_a_selection_on_another_device():
    """Layers that share an indexer may be on the next GPU."""
    here, there = (SequenceBatch.without_cache([2, 3], device) for device in ("cpu", "meta"))
    for counted_in in ("positions", "rows"):
        selection = Selection(torch.zeros(5, 3, dtype=torch.int32), counted_in=counted_in, batch=here)
        assert selection.indices(counted_in, here, ALL_ROWS) is selection.topk_indices
        assert selection.indices("rows", there, ALL_ROWS).is_meta
    assert Selection().indices("rows", there, ALL_ROWS) is None


def test_a_shared_layer_alone(tmp_path):
    ours = pair("glm_moe_dsa, shared indexers", tmp_path).ours
    mask = lengths.lengths_mask(batch_size=1, q_length=4)
    x, positions = torch.randn(1, 4, 64), torch.arange(4)[None]
    arguments = (x, ours.model.rotary_emb(x, positions), mask, None)
    refused("prev_topk_indices: a layer without an indexer", ours.model.layers[2].self_attn, *arguments, positions)
    refused("position_ids: must be", ours.model.layers[0].self_attn, *arguments)


def test_layers_in_their_order(models, tokens):
    storage = Storage(64, {"latent": (1, 8, torch.float32)})
    layer = PagedLayer(storage, 2, torch.device("cpu"))
    layer.reserve([1, 70])
    assert layer.pages_each == 3 and layer["latent"].shape == (6, 64, 1, 8)
    assert layer.block_table([1], torch.device("cpu")).tolist() == [[3, 4, 5]]
    for call in (layer.update, layer.offload, layer.prefetch):
        refused(CACHE, call)
