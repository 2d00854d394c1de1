"""Layers refuse wrong arguments of constructors and passes, before and after `fuse`. Messages name the argument."""

import re
from functools import partial

import pytest
import torch
from torch import nn

from dsa_layers import DSAAttention, LayerCache, SequenceBatch, fuse
from dsa_layers.batch.selected import Selected
from dsa_layers.cache.compressed_kv_cache import CompressedKVCache, CompressedLayerCache, EntryShape
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.experts import Experts
from dsa_layers.layers.linear import BlockFP8Linear
from dsa_layers.layers.moe import GroupedSigmoidRouter
from dsa_layers.layers.window_attention import WindowAttention
from tests.layers.layers import small_layers
from tests.layers.layers.small_layers import (
    CASES,
    HIDDEN,
    RANK,
    RATIO,
    ROTARY,
    attention,
    compressed_attention,
    indexer,
)

BATCH = SequenceBatch.without_cache([5])
NO_INDEXER = "indexer: must be None or a torch.nn.Module with top_k and select, as LightningIndexer is, got "
INDEXER, BF16 = indexer(), torch.bfloat16


def refused(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        call()


GATE = "gate: must be None, 'x' or 'heads' with q_lora_rank=None, got 'queries'"
OTHER_RANK = "indexer: its q_lora_rank must be the layer's 64, got 128"
FP4 = "fp4: FP4 weights are multiplied with FP8 activations; accepted with fp8=True"
FP8_SIZES = "hidden, inner: must be multiples of 128 for FP8 weights, got 128 and 64"


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (indexer, {"top_k": 0}, "top_k: must be at least 1, got 0"),
        (indexer, {"rope_dims": "all"}, "rope_dims: must be 'first' or 'last', got 'all'"),
        (indexer, {"accumulators": torch.int8}, "accumulators: must be float32 or float16, got int8"),
        (indexer, {"dtype": torch.int8}, "dtype: must be float32, bfloat16 or float16, got int8"),
        (attention, {"q_lora_rank": 1.5}, "q_lora_rank: must be an integer, got 1.5"),
        (attention, {"q_lora_rank": None, "gate": "queries"}, GATE),
        (attention, {"scale_latents": 2}, "scale_latents: must be True or False, got 2"),
        (attention, {"rope_dim": 63}, "rope_dim: must be even, got 63"),
        (attention, {"indexer": nn.Linear(8, 8)}, NO_INDEXER + "Linear"),
        (attention, {"q_lora_rank": 64, "indexer": INDEXER}, OTHER_RANK),
        (attention, {"dtype": BF16, "indexer": INDEXER}, "indexer: dtype must be layer's bfloat16, got float32"),
        (lambda: BlockFP8Linear(100, 8), {}, "in_features: must be a multiple of 128, got 100"),
        (lambda: GroupedSigmoidRouter(16, 10, 2, n_group=4), {}, "n_group: must divide n_experts=10, got 4"),
        (lambda: Experts(2, 128, 128, fp4=True), {}, FP4),
        (lambda: Experts(2, 128, 64, fp8=True), {}, FP8_SIZES),
    ],
)
def test_wrong_options_are_refused(make, options, message):
    refused(lambda: make(**options), message)


@pytest.mark.parametrize("kind", [DSAAttention, CompressedAttention, WindowAttention])
@pytest.mark.parametrize("fused", [False, True])
def test_rows_and_tokens_of_other_numbers_are_refused(kind, fused):
    case, x = CASES[kind], torch.randn(39, HIDDEN)
    layer = fuse(case.make()) if fused else case.make()
    for wrong in (x[:-1], torch.cat((x, x))):
        told = f"x: must have a row for each of the batch's 39 tokens, got {len(wrong)} rows"
        refused(partial(case.run, layer, wrong), told)


def test_attention_has_an_indexer_of_its_dtype_or_none():
    assert not any("indexer" in name for name in attention(None).state_dict())
    attention(indexer(fp8=True), fp8=True, dtype=BF16)


def test_quantised_selection_needs_128_channels():
    """`project`, which training calls, does not quantise, so it accepts other numbers of channels."""
    layer, given = indexer(head_dim=100, quantize=True), (torch.zeros(5, HIDDEN), torch.zeros(5, RANK))
    assert layer.project(*given, ROTARY(BATCH.positions))[0].shape == (5, 4, 100)
    message = "head_dim: must be 128 for selection with quantize=True, got 100"
    refused(lambda: layer.select(*given, ROTARY(BATCH.positions), BATCH), message)


PAGE = 32
BEFORE_FUSE = "cache: must be None before dsa_layers.fuse, which prepares "
NO_GRADIENTS = "x: a layer for inference has no gradients; accepted: requires_grad=False, or a pass under "
NO_GRADIENTS += "torch.no_grad(), got requires_grad=True"


def pages(index=PAGE, page_size=PAGE):
    """Return a layer's FP8 pages, with page_size latents and `index` index keys per page; index=None: no index keys."""
    latent = torch.zeros(16, page_size, 1, 656, dtype=torch.uint8)
    return LayerCache(latent, None if index is None else torch.zeros(16, index, 1, 132, dtype=torch.uint8))


def paged(page_size=PAGE, total=5):
    return SequenceBatch.paged([5], [total], [[0]], page_size, state_slots=[0])


def run(layer, x, batch, cache=None):
    """Run a pass of 5 tokens through a layer of attention or compressed attention."""
    rope = ROTARY(torch.arange(5))
    return layer(x, *((rope, rope) if hasattr(layer, "compressor") else rope), batch, cache)


def check_refused(layer, given, changed, message):
    refused(lambda: run(layer, **{"x": torch.zeros(5, HIDDEN)} | given | changed), message)


PLAIN_AND_FUSED = {
    "attention": attention,
    "compressed attention": compressed_attention,
    "fused attention": lambda: fuse(attention(indexer())),
    "fused compressed attention": lambda: fuse(compressed_attention()),
}


@pytest.mark.parametrize("make", PLAIN_AND_FUSED.values(), ids=PLAIN_AND_FUSED)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": [1.0]}, "x: must be a torch.Tensor, got list"),
        ({"x": torch.zeros(5, HIDDEN).bfloat16()}, "x: dtype must be float32, got bfloat16"),
        ({"x": torch.zeros(5, 64)}, "x: shape must be [T, 256], got [5, 64]"),
        ({"batch": [5]}, "batch: must be a SequenceBatch or a DecodeBatch, got list"),
        ({"batch": paged(total=7)}, "cache: is needed when a sequence has more keys than new tokens"),
    ],
)
def test_wrong_inputs_of_a_pass_are_refused(make, changed, message):
    check_refused(make(), {"batch": BATCH}, changed, message)


def test_plain_layers_and_indexers_take_no_cache():
    for layer in (attention(), compressed_attention()):
        check_refused(layer, {"batch": BATCH, "cache": pages()}, {}, BEFORE_FUSE + "a layer for inference")
    select, of_entries = indexer().select, small_layers.compressed_indexer().select
    refused(lambda: select(*[None] * 4, pages()), BEFORE_FUSE + "a layer for inference")
    refused(lambda: of_entries(*[None] * 4, pages(), entry_rope=None), BEFORE_FUSE + "a layer for inference")


NO_INDEX = "cache: must have index pages where a layer has an indexer, got LayerCache(latent, None)"
FP32_INDEX = "cache: an indexer with quantize=True needs FP8 index pages, got torch.float32"
NO_ENTRIES = "cache: must have entries where the layer compresses tokens, got None"
WRONG_WITH_PAGES = [
    ({"x": torch.zeros(5, HIDDEN, requires_grad=True)}, NO_GRADIENTS),
    ({"batch": paged(64)}, "page_size: must be the cache's 32, got 64"),
    ({"batch": BATCH}, "batch: must have pages where there is a cache, got block_table=None"),
]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *WRONG_WITH_PAGES,
        ({"cache": PagedKVCache(1, 4)}, "cache: must be a LayerCache or None, got PagedKVCache"),
        ({"cache": pages(index=64)}, "page_size: must be the cache's 64, got 32"),
        ({"cache": pages(index=None)}, NO_INDEX),
        ({"cache": PagedKVCache(1, 1, PAGE, index=torch.float32).layer(0)}, FP32_INDEX),
    ],
)
def test_fused_attention_refuses_wrong_pages(changed, message):
    given = {"batch": paged(), "cache": pages()}
    check_refused(fuse(attention(indexer(quantize=True))), given, changed, message)


def test_layers_without_an_indexer_need_a_selection_and_no_index_pages():
    layer, batch = fuse(attention()), paged()
    given = torch.zeros(5, HIDDEN), *ROTARY(batch.positions), batch, pages(index=None)
    assert layer(*given, Selected(None, batch))[0].shape == (5, HIDDEN)
    message = "selected: a layer without an indexer needs what a layer before it selected, got None"
    refused(lambda: layer(*given), message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        *WRONG_WITH_PAGES,
        ({"cache": pages()}, "cache: must be a CompressedLayerCache or None, got LayerCache"),
        ({"cache": CompressedLayerCache(torch.zeros(2, 11, 1, 512))}, NO_ENTRIES),
    ],
)
def test_fused_compressed_attention_refuses_a_wrong_cache(changed, message):
    layer = fuse(compressed_attention(small_layers.compressor(512)))
    shape = EntryShape(RATIO, 512, layer.compressor.state_shape)
    options = {"state_slots": 2, "window": layer.window, "dim": 512, "entries": torch.float32}
    cache = CompressedKVCache([(shape, None)], 4, PAGE, **options).layer(0)
    check_refused(layer, {"batch": paged(), "cache": cache}, changed, message)
