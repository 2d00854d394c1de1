"""What attention layers refuse, when they are made and in a pass: by the argument's name, with what it got."""

import copy
import re

import pytest
import torch
from torch import nn

from dsa_layers.batch.decode_batch import DecodeBatch
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.compressed_kv_cache import CompressedKVCache, CompressedLayerCache, EntryShape
from dsa_layers.cache.kv_cache import LayerCache, PagedKVCache
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.layers.compressed_attention import CompressedAttention
from dsa_layers.layers.compressor import Compressor
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.pass_checks import check_rows, check_stored_keys
from dsa_layers.layers.rope import RotaryEmbedding, rope_frequencies
from dsa_layers.layers.selection import Selection

HIDDEN, RANK, HEADS, PAGE = 128, 128, 2, 32
ROTARY = RotaryEmbedding(rope_frequencies(64, 1e4))


def make_indexer(**options):
    return LightningIndexer(**{"hidden": HIDDEN, "q_lora_rank": RANK, "n_heads": 2, "top_k": 4} | options)


def make_layer(indexer, **options):
    return PagedAttention(HIDDEN, HEADS, indexer, **{"q_lora_rank": RANK} | options)


@pytest.fixture(scope="module")
def layer():
    return make_layer(make_indexer())


def refused(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        call()


def pages(index=True, page_size=PAGE):
    """What an engine has allocated."""
    latent = torch.zeros(16, page_size, 1, 656, dtype=torch.uint8)
    return LayerCache(latent, torch.zeros(16, page_size, 1, 132, dtype=torch.uint8) if index else None)


def paged(page_size=PAGE, lens=(5,)):
    return SequenceBatch.paged(lens, lens, [[i] for i in range(len(lens))], page_size)


def run(layer, **changed):
    given = {"x": torch.zeros(5, HIDDEN), "batch": paged(), "cache": None} | changed
    angles = ROTARY(torch.arange(2 if isinstance(given["batch"], DecodeBatch) else 5))
    with torch.no_grad():
        return layer(given["x"], *angles, given["batch"], given["cache"], given.get("selection"))


def step(page_size):
    """Two sequences, as engines make a step's batch."""
    table, lens = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    return {"x": torch.zeros(2, HIDDEN), "batch": DecodeBatch(table, page_size, lens, 3 * page_size)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 0}, "hidden: must be at least 1, got 0"),
        ({"q_lora_rank": 0}, "q_lora_rank: must be at least 1, got 0"),
        ({"n_heads": 0}, "n_heads: must be at least 1, got 0"),
        ({"top_k": 0}, "top_k: must be at least 1, got 0"),
        ({"top_k": -1}, "top_k: must be at least 1, got -1"),
        ({"top_k": 1.5}, "top_k: must be an integer, got 1.5"),
        ({"top_k": None}, "top_k: must be an integer, got None"),
        ({"head_dim": 0}, "head_dim: must be at least 1, got 0"),
        ({"workspace": "1"}, "workspace: must be an integer, got '1'"),
        ({"quantize": "x"}, "quantize: must be True or False, got 'x'"),
        ({"rope_interleaved": 1}, "rope_interleaved: must be True or False, got 1"),
        ({"rope_dims": "all"}, "rope_dims: must be 'first' or 'last', got 'all'"),
        ({"accumulators": torch.int8}, "accumulators: must be float32 or float16, got int8"),
        ({"accumulators": "float16"}, "accumulators: must be a torch.dtype, got str"),
        ({"fp8": 1}, "fp8: must be True or False, got 1"),
        ({"dtype": torch.int8}, "dtype: must be float32, bfloat16 or float16, got int8"),
        ({"use_ue8m0": None}, "use_ue8m0: must be True or False, got None"),
    ],
)
def test_indexers_that_are_not_made(options, message):
    refused(lambda: make_indexer(**options), message)


def test_quantised_selection_is_of_128_channels():
    """Which training does not ask for."""
    indexer = make_indexer(head_dim=100)
    x, angles = torch.zeros(5, HIDDEN), ROTARY(torch.arange(5))
    assert indexer.project(x, x, *angles)[0].shape == (5, 2, 100)
    message = "head_dim: must be 128 for selection with quantize=True, got 100"
    refused(lambda: indexer.select(x, x, *angles, paged()), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 0}, "hidden: must be at least 1, got 0"),
        ({"n_heads": 1.0}, "n_heads: must be an integer, got 1.0"),
        ({"q_lora_rank": None}, "q_lora_rank: must be an integer, got None"),
        ({"kv_lora_rank": 0}, "kv_lora_rank: must be at least 1, got 0"),
        ({"nope_dim": -1}, "nope_dim: must be at least 1, got -1"),
        ({"rope_dim": 63}, "rope_dim: must be even, got 63"),
        ({"v_dim": 0}, "v_dim: must be at least 1, got 0"),
        ({"softmax_scale": "1"}, "softmax_scale: must be a number, got str"),
        ({"eps": -1.0}, "eps: must be at least 0, got -1.0"),
        ({"dtype": "bfloat16"}, "dtype: must be a torch.dtype, got str"),
        (
            {"indexer": 5},
            "indexer: must be None or a torch.nn.Module with top_k and select, as LightningIndexer is, got int",
        ),
        (
            {"indexer": nn.Linear(8, 8)},
            "indexer: must be None or a torch.nn.Module with top_k and select, as LightningIndexer is, got Linear",
        ),
        ({"indexer": LightningIndexer(64, RANK)}, "indexer: its hidden must be the layer's 128, got 64"),
        ({"indexer": LightningIndexer(HIDDEN, 64)}, "indexer: its q_lora_rank must be the layer's 128, got 64"),
        ({"dtype": torch.bfloat16}, "indexer: dtype must be layer's bfloat16, got float32"),
    ],
)
def test_attention_that_is_not_made(options, message):
    arguments = {"hidden": HIDDEN, "n_heads": HEADS, "indexer": make_indexer(), "q_lora_rank": RANK}
    refused(lambda: PagedAttention(**arguments | options), message)


def test_indexers_of_ones_own_and_none_are_taken():
    class Own(nn.Module):
        top_k = 4

        def select(self, *_, **__):
            """Is not called."""

    assert isinstance(make_layer(Own()).indexer, Own) and make_layer(None).indexer is None
    make_layer(make_indexer(fp8=True), fp8=True, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
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
    cache, layer = pages(index=False), make_layer(None)
    assert not any("indexer" in name for name in layer.state_dict())
    assert run(layer, cache=cache, selection=Selection()).shape == (5, HIDDEN)
    message = "selection: a layer without an indexer needs what a layer before it selected, got None"
    refused(lambda: run(layer, cache=cache), message)


def test_autocast_takes_other_dtypes(layer):
    """As torch's own layers do; outside of it they are refused."""
    with torch.autocast("cpu", torch.bfloat16):
        check_rows("x", torch.zeros(5, HIDDEN).bfloat16(), layer.q_a_proj)
        refused(lambda: check_rows("x", None, layer.q_a_proj), "x: must be a torch.Tensor, got NoneType")
    check_rows("x", torch.zeros(5, 7).bfloat16(), nn.Linear(8, 8))  # says itself what it takes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_fp8_layers_take_every_float(dtype):
    layer = make_layer(make_indexer(fp8=True, dtype=torch.bfloat16), fp8=True, dtype=torch.bfloat16)
    check_rows("x", torch.zeros(5, HIDDEN, dtype=dtype), layer.q_a_proj)
    message = "x: dtype must be float32, bfloat16 or float16, got float64"
    refused(lambda: check_rows("x", torch.zeros(5, HIDDEN).double(), layer.q_a_proj), message)


@pytest.fixture(scope="module")
def compressed():
    compressor = Compressor(HIDDEN, 64, 4, overlap=False)
    sizes = {"dim": 64, "window": 8, "q_lora_rank": RANK, "o_groups": 1, "o_lora_rank": 32}
    shape = EntryShape(4, 64, compressor.state_shape)
    cache = CompressedKVCache([(shape, None)], 4, PAGE, state_slots=2, window=8, dim=64, entries=torch.float32)
    return CompressedAttention(HIDDEN, HEADS, compressor=compressor, **sizes), cache.layer(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
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


def test_keys_in_a_cache_have_no_gradients(compressed):
    """A pass that asks for some is refused before anything is stored, whichever part of the keys asks; one in which
    they are frozen, or the queries alone are trained, is not."""
    (layer, cache), rope = copy.deepcopy(compressed), ROTARY(torch.arange(5))
    angles, held = (rope, rope), cache.window
    makers = ("wkv.weight", "kv_norm.weight", "compressor.wkv.weight", "compressor.ape", "compressor.norm.weight")
    batch, x = SequenceBatch.paged([5], [5], [[0]], PAGE, state_slots=[0]), torch.randn(5, HIDDEN)
    layer.requires_grad_(False)
    before = held.zero_().clone()

    def message(name):
        return (
            "cache: must be None where keys need gradients, which do not reach what a cache holds, got one and "
            f"{name} with requires_grad=True; accepted: None, requires_grad=False, or a pass under torch.no_grad()"
        )

    refused(lambda: layer(x.clone().requires_grad_(), *angles, batch, cache), message("x"))
    for name in makers:
        layer.get_parameter(name).requires_grad_(True)
        refused(lambda: layer(x, *angles, batch, cache), message(name))
        with torch.no_grad():
            check_stored_keys(x, layer=layer)
        layer.get_parameter(name).requires_grad_(False)
    assert torch.equal(held, before)
    assert not layer(x, *angles, batch, cache).requires_grad and not torch.equal(held, before)
    queries = layer.wq_b.weight
    queries.requires_grad_(True)
    grads = []
    for given in ((SequenceBatch.without_cache([5]),), (batch, cache)):
        layer(x, *angles, *given).sum().backward()
        grads.append(queries.grad)
        queries.grad = None
    assert grads[0].any()
    # Of a cache's bytes rounded.
    torch.testing.assert_close(*grads, rtol=0.1, atol=0.1 * grads[0].abs().max().item())
