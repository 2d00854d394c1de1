"""Plain layers refuse wrong arguments, when they are made and in a pass. The message names the argument."""

import re

import pytest
import torch
from torch import nn

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.layers.experts import Experts
from dsa_layers.layers.linear import BlockFP8Linear, check_rows
from dsa_layers.layers.moe import GroupedSigmoidRouter
from tests.layers.layers.small_layers import (
    CASES,
    HIDDEN,
    INDEXERS,
    RANK,
    ROTARY,
    attention,
    compressed_attention,
    indexer,
)

BATCH = SequenceBatch.without_cache([5])
NO_INDEXER = "indexer: must be None or a torch.nn.Module with top_k and select, as LightningIndexer is, got "
OF_INDEXER = [
    ({"top_k": 0}, "top_k: must be at least 1, got 0"),
    ({"top_k": 1.5}, "top_k: must be an integer, got 1.5"),
    ({"head_dim": 0}, "head_dim: must be at least 1, got 0"),
    ({"workspace": "1"}, "workspace: must be an integer, got '1'"),
    ({"quantize": "x"}, "quantize: must be True or False, got 'x'"),
    ({"rope_interleaved": 1}, "rope_interleaved: must be True or False, got 1"),
    ({"rope_dims": "all"}, "rope_dims: must be 'first' or 'last', got 'all'"),
    ({"accumulators": torch.int8}, "accumulators: must be float32 or float16, got int8"),
    ({"fp8": 1}, "fp8: must be True or False, got 1"),
    ({"dtype": torch.int8}, "dtype: must be float32, bfloat16 or float16, got int8"),
    ({"use_ue8m0": None}, "use_ue8m0: must be True or False, got None"),
]
OF_ATTENTION = [
    ({"q_lora_rank": None}, "q_lora_rank: must be an integer, got None"),
    ({"kv_lora_rank": 0}, "kv_lora_rank: must be at least 1, got 0"),
    ({"nope_dim": -1}, "nope_dim: must be at least 1, got -1"),
    ({"rope_dim": 63}, "rope_dim: must be even, got 63"),
    ({"v_dim": 0}, "v_dim: must be at least 1, got 0"),
    ({"softmax_scale": "1"}, "softmax_scale: must be a number, got str"),
    ({"eps": -1.0}, "eps: must be at least 0, got -1.0"),
    ({"indexer": nn.Linear(8, 8)}, NO_INDEXER + "Linear"),
    ({"q_lora_rank": 64, "indexer": indexer()}, "indexer: its q_lora_rank must be the layer's 64, got 128"),
    ({"dtype": torch.bfloat16, "indexer": indexer()}, "indexer: dtype must be layer's bfloat16, got float32"),
]
FP4 = "fp4: FP4 weights are multiplied with FP8 activations; accepted with fp8=True"
FP8_SIZES = "hidden, inner: must be multiples of 128 for FP8 weights, got 128 and 64"


def refused(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        call()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        *((indexer, *row) for row in OF_INDEXER),
        *((attention, *row) for row in OF_ATTENTION),
        (lambda: BlockFP8Linear(100, 8), {}, "in_features: must be a multiple of 128, got 100"),
        (lambda: GroupedSigmoidRouter(16, 10, 2, n_group=4), {}, "n_group: must divide n_experts=10, got 4"),
        (lambda: Experts(2, 128, 128, fp4=True), {}, FP4),
        (lambda: Experts(2, 128, 64, fp8=True), {}, FP8_SIZES),
    ],
)
def test_layers_that_are_not_made(make, options, message):
    refused(lambda: make(**options), message)


class Own(nn.Module):
    top_k = 4

    def select(self, *_, **__):
        """Is not called."""


def test_attention_takes_any_indexer_or_none():
    assert isinstance(attention(Own()).indexer, Own)
    assert not any("indexer" in name for name in attention(None).state_dict())
    attention(indexer(fp8=True), fp8=True, dtype=torch.bfloat16)


def test_quantised_selection_is_of_128_channels():
    """Training does not quantise, so it takes other numbers."""
    layer, given = indexer(head_dim=100, quantize=True), (torch.zeros(5, HIDDEN), torch.zeros(5, RANK))
    assert layer.project(*given, ROTARY(BATCH.positions))[0].shape == (5, 4, 100)
    message = "head_dim: must be 128 for selection with quantize=True, got 100"
    refused(lambda: layer.select(*given, ROTARY(BATCH.positions), BATCH), message)


BEFORE_FUSE = "cache: must be None before dsa_layers.fuse, which prepares "
CACHE = LayerCache(torch.zeros(1, 32, 1, 656, dtype=torch.uint8), None)
LONGER = SequenceBatch.paged([5], [7], [[0]], 32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": None}, "x: must be a torch.Tensor, got NoneType"),
        ({"x": torch.zeros(5, 64)}, "x: shape must be [T, 256], got [5, 64]"),
        ({"batch": [5]}, "batch: must be a SequenceBatch or a DecodeBatch, got list"),
        ({"batch": LONGER}, "cache: is needed when a sequence has more keys than new tokens"),
        ({"cache": CACHE}, BEFORE_FUSE + "a layer for inference"),
    ],
)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_plain_pass(compressed, changed, message):
    given = {"x": torch.zeros(5, HIDDEN), "batch": BATCH, "cache": None} | changed
    layer, rope = compressed_attention() if compressed else attention(), ROTARY(BATCH.positions)
    angles = (rope, None) if compressed else rope
    refused(lambda: layer(given["x"], *angles, given["batch"], given["cache"]), message)


@pytest.mark.parametrize(("kind", "options"), [*zip(INDEXERS, ({"entry_rope": None}, {}))])
def test_plain_indexers_take_no_cache(kind, options):
    layer = CASES[kind].make()
    refused(lambda: layer.select(*[None] * 4, CACHE, **options), BEFORE_FUSE + "an indexer for inference")


def test_autocast_and_fp8_layers_take_other_dtypes():
    x, layer = torch.zeros(5, HIDDEN), attention().q_a_proj
    with torch.autocast("cpu", torch.bfloat16):
        check_rows("x", x.bfloat16(), layer)
    refused(lambda: check_rows("x", x.bfloat16(), layer), "x: dtype must be float32, got bfloat16")
    fp8 = BlockFP8Linear(HIDDEN, 128)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check_rows("x", x.to(dtype), fp8)
    refused(lambda: check_rows("x", x.double(), fp8), "x: dtype must be float32, bfloat16 or float16, got float64")
