"""Fused attention refuses wrong arguments. The message names the argument."""

import pytest
import torch

from dsa_layers.batch.decode_batch import DecodeBatch
from dsa_layers.batch.selected import Selected
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.compressed_kv_cache import CompressedKVCache, CompressedLayerCache, EntryShape
from dsa_layers.cache.kv_cache import LayerCache, PagedKVCache
from dsa_layers.engine.fuse import fuse
from tests.layers.layers import small_layers
from tests.layers.layers.small_layers import HIDDEN, RATIO, ROTARY
from tests.layers.layers.test_wrong_layers import refused

PAGE = 32
GRADIENTS = torch.zeros(5, HIDDEN, requires_grad=True)
NO_GRADIENTS = (
    "x: a layer for inference has no gradients; accepted: requires_grad=False, or a pass under torch.no_grad(), got "
    "requires_grad=True"
)
NO_PAGES = "batch: must have pages where there is a cache, got block_table=None"
NO_INDEX = "cache: must have index pages where a layer has an indexer, got LayerCache(latent, None)"
FLOAT_INDEX = "cache: an indexer with quantize=True needs FP8 index pages, got torch.float32"


def pages(index=PAGE, page_size=PAGE):
    """The memory of an inference engine. index: tokens of a page of index keys; None without such pages."""
    latent = torch.zeros(16, page_size, 1, 656, dtype=torch.uint8)
    return LayerCache(latent, None if index is None else torch.zeros(16, index, 1, 132, dtype=torch.uint8))


def paged(page_size=PAGE, total=5):
    return SequenceBatch.paged([5], [total], [[0]], page_size, state_slots=[0])


def decoding(page_size):
    table, lens = torch.zeros(5, 3, dtype=torch.int32), torch.ones(5, dtype=torch.int32)
    return DecodeBatch(table, page_size, lens, 3 * page_size)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": GRADIENTS}, NO_GRADIENTS),
        ({"x": [1.0]}, "x: must be a torch.Tensor, got list"),
        ({"x": torch.zeros(5, HIDDEN).bfloat16()}, "x: dtype must be float32, got bfloat16"),
        ({"x": torch.zeros(1, 5, HIDDEN)}, "x: shape must be [T, 256], got [1, 5, 256]"),
        ({"batch": None}, "batch: must be a SequenceBatch or a DecodeBatch, got NoneType"),
        ({"batch": paged(total=7), "cache": None}, "cache: is needed when a sequence has more keys than new tokens"),
        ({"batch": decoding(16)}, "page_size: must be the cache's 32, got 16"),
        ({"cache": PagedKVCache(1, 4)}, "cache: must be a LayerCache or None, got PagedKVCache"),
        ({"cache": pages(page_size=64)}, "page_size: must be the cache's 64, got 32"),
        ({"cache": pages(index=64)}, "page_size: must be the cache's 64, got 32"),
        ({"batch": SequenceBatch.without_cache([5])}, NO_PAGES),
        ({"cache": pages(index=None)}, NO_INDEX),
        ({"cache": PagedKVCache(1, 1, PAGE, index=torch.float32).layer(0)}, FLOAT_INDEX),
    ],
)
def test_a_pass_of_attention(changed, message):
    layer = fuse(small_layers.attention(small_layers.indexer(quantize=True)))
    given = {"x": torch.zeros(5, HIDDEN), "batch": paged(), "cache": pages()} | changed
    refused(lambda: layer(given["x"], *ROTARY(torch.arange(5)), given["batch"], given["cache"]), message)


def test_layers_without_an_indexer_need_a_selection_and_no_index_pages():
    layer, batch = fuse(small_layers.attention()), paged()
    given = torch.zeros(5, HIDDEN), *ROTARY(batch.positions), batch, pages(index=None)
    assert layer(*given, Selected(None, batch))[0].shape == (5, HIDDEN)
    message = "selected: a layer without an indexer needs what a layer before it selected, got None"
    refused(lambda: layer(*given), message)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": GRADIENTS}, NO_GRADIENTS),
        ({"x": torch.zeros(5, 64)}, "x: shape must be [T, 256], got [5, 64]"),
        ({"batch": None}, "batch: must be a SequenceBatch or a DecodeBatch, got NoneType"),
        ({"batch": paged(64)}, "page_size: must be the cache's 32, got 64"),
        ({"batch": SequenceBatch.without_cache([5])}, NO_PAGES),
        ({"cache": pages()}, "cache: must be a CompressedLayerCache or None, got LayerCache"),
        (
            {"cache": CompressedLayerCache(torch.zeros(2, 11, 1, 512))},
            "cache: must have entries where the layer compresses tokens, got None",
        ),
    ],
)
def test_a_pass_of_compressed_attention(changed, message):
    layer = fuse(small_layers.compressed_attention(small_layers.compressor(512)))
    shape = EntryShape(RATIO, 512, layer.compressor.state_shape)
    options = {"state_slots": 2, "window": layer.window, "dim": 512, "entries": torch.float32}
    cache = CompressedKVCache([(shape, None)], 4, PAGE, **options).layer(0)
    rope, given = ROTARY(torch.arange(5)), {"x": torch.zeros(5, HIDDEN), "batch": paged(), "cache": cache} | changed
    refused(lambda: layer(given["x"], rope, rope, given["batch"], given["cache"]), message)
