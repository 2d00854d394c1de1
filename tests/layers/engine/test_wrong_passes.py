"""Fused attention refuses wrong arguments. The message names the argument."""

import pytest
import torch

from dsa_layers.batch.decode_batch import DecodeBatch
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.compressed_kv_cache import CompressedKVCache, CompressedLayerCache, EntryShape
from dsa_layers.cache.kv_cache import LayerCache, PagedKVCache
from dsa_layers.engine.fuse import fuse
from dsa_layers.engine.selected import Selected
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.compressor import Compressor
from tests.layers.layers.small_layers import ROTARY
from tests.layers.layers.test_wrong_layers import HEADS, HIDDEN, PAGE, RANK, make_indexer, make_layer, refused

NO_GRADIENTS = (
    "x: a layer for inference has no gradients; accepted: requires_grad=False, or a pass under torch.no_grad(), got "
    "requires_grad=True"
)


@pytest.fixture(scope="module")
def layer():
    return fuse(make_layer(make_indexer()))


def pages(index=True, page_size=PAGE):
    """The memory of an inference engine."""
    latent = torch.zeros(16, page_size, 1, 656, dtype=torch.uint8)
    return LayerCache(latent, torch.zeros(16, page_size, 1, 132, dtype=torch.uint8) if index else None)


def paged(page_size=PAGE):
    return SequenceBatch.paged([5], [5], [[0]], page_size)


def run(layer, **changed):
    given = {"x": torch.zeros(5, HIDDEN), "batch": paged(), "cache": None} | changed
    angles = ROTARY(torch.arange(2 if isinstance(given["batch"], DecodeBatch) else 5))
    return layer(given["x"], *angles, given["batch"], given["cache"], given.get("selected"))


def step(page_size):
    """The batch of a decoding step of two sequences."""
    table, lens = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    return {"x": torch.zeros(2, HIDDEN), "batch": DecodeBatch(table, page_size, lens, 3 * page_size)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": torch.zeros(5, HIDDEN, requires_grad=True)}, NO_GRADIENTS),
        ({"x": None}, "x: must be a torch.Tensor, got NoneType"),
        ({"x": [1.0]}, "x: must be a torch.Tensor, got list"),
        ({"x": torch.zeros(5, HIDDEN).bfloat16()}, "x: dtype must be float32, got bfloat16"),
        ({"x": torch.zeros(5, 64)}, "x: shape must be [T, 128], got [5, 64]"),
        ({"x": torch.zeros(1, 5, HIDDEN)}, "x: shape must be [T, 128], got [1, 5, 128]"),
        ({"batch": None}, "batch: must be a SequenceBatch or a DecodeBatch, got NoneType"),
        ({"batch": [5]}, "batch: must be a SequenceBatch or a DecodeBatch, got list"),
        (
            {"batch": SequenceBatch.paged([5], [7], [[0]], PAGE)},
            "cache: is needed when a sequence has more keys than new tokens",
        ),
        (step(16) | {"cache": pages()}, "page_size: must be the cache's 32, got 16"),
        ({"cache": PagedKVCache(1, 4)}, "cache: must be a LayerCache or None, got PagedKVCache"),
        ({"cache": pages(page_size=64)}, "page_size: must be the cache's 64, got 32"),
        (
            {"cache": LayerCache(pages().latent, pages(page_size=64).index)},
            "page_size: must be the cache's 64, got 32",
        ),
        (
            {"cache": pages(), "batch": SequenceBatch.without_cache([5])},
            "batch: must have pages where there is a cache, got block_table=None",
        ),
        (
            {"cache": pages(index=False)},
            "cache: must have index pages where a layer has an indexer, got LayerCache(latent, None)",
        ),
        (
            {"cache": PagedKVCache(1, 1, PAGE, index=torch.float32).layer(0)},
            "cache: an indexer with quantize=True needs FP8 index pages, got torch.float32",
        ),
    ],
)
def test_a_pass_of_attention(layer, options, message):
    refused(lambda: run(layer, **options), message)


def test_layers_without_an_indexer_need_a_selection_and_no_index_pages():
    cache, layer = pages(index=False), fuse(make_layer(None))
    y, _ = run(layer, cache=cache, selected=Selected(None, paged()))
    assert y.shape == (5, HIDDEN)
    message = "selected: a layer without an indexer needs what a layer before it selected, got None"
    refused(lambda: run(layer, cache=cache), message)


@pytest.fixture(scope="module")
def compressed():
    compressor = Compressor(HIDDEN, 64, 4, overlap=False)
    sizes = {"dim": 64, "window": 8, "q_lora_rank": RANK, "o_groups": 1, "o_lora_rank": 32}
    shape = EntryShape(4, 64, compressor.state_shape)
    cache = CompressedKVCache([(shape, None)], 4, PAGE, state_slots=2, window=8, dim=64, entries=torch.float32)
    return fuse(CompressedAttention(HIDDEN, HEADS, compressor=compressor, **sizes)), cache.layer(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, HIDDEN, requires_grad=True)}, NO_GRADIENTS),
        ({"x": torch.zeros(5, 64)}, "x: shape must be [T, 128], got [5, 64]"),
        ({"x": None}, "x: must be a torch.Tensor, got NoneType"),
        ({"batch": None}, "batch: must be a SequenceBatch or a DecodeBatch, got NoneType"),
        ({"batch": paged(64)}, "page_size: must be the cache's 32, got 64"),
        (
            {"batch": SequenceBatch.without_cache([5])},
            "batch: must have pages where there is a cache, got block_table=None",
        ),
        ({"cache": pages()}, "cache: must be a CompressedLayerCache or None, got LayerCache"),
        (
            {"cache": CompressedLayerCache(torch.zeros(2, 11, 1, 64))},
            "cache: must have entries where the layer compresses tokens, got None",
        ),
    ],
)
def test_a_pass_of_compressed_attention(compressed, change, message):
    layer, cache = compressed
    batch = SequenceBatch.paged([5], [5], [[0]], PAGE, state_slots=[0])
    rope = ROTARY(batch.positions)
    arguments = {"x": torch.zeros(5, HIDDEN), "batch": batch, "cache": cache} | change
    refused(lambda: layer(arguments["x"], rope, rope, arguments["batch"], arguments["cache"]), message)


def test_a_pass_of_compressed_attention(compressed, change, message):
    layer, cache = compressed
    batch = SequenceBatch.paged([5], [5], [[0]], PAGE, state_slots=[0])
    rope = ROTARY(batch.positions)
    arguments = {"x": torch.zeros(5, HIDDEN), "batch": batch, "cache": cache} | change
    refused(lambda: layer(arguments["x"], rope, rope, arguments["batch"], arguments["cache"]), message)
