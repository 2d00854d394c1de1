"""Passes over a cache whose rows ranks share: prompts in chunks, mixed with single tokens, beside whole rows."""

import contextlib
import functools
from unittest import mock

import pytest
import torch

from dsa_layers import load_model
from dsa_layers.batch.prefill import Chunk, prefill_batch
from dsa_layers.engine import paged_attention
from dsa_layers.families.registry import model_types
from dsa_layers.layers import moe
from dsa_layers.engine.norm_and_cast import takes
from dsa_layers.parallel import rows
from tests.layers.parallel.processes import in_ranks
from tests.layers.parallel.ways import split_by

# New tokens of each of three sequences, a pass. Rows are shared from 256 on, of single tokens never.
# Of the first sequence deepseek_v4 selects among more entries than it takes, which have four tokens each.
FEW = (262, 0, 1), (57, 199, 1), (1, 1, 1)
PASSES = *FEW, (1, 255, 0), (86, 87, 86), (256, 0, 0)
LENGTH = 900
TOKENS = [[2 + (i * i + 7 * s) % 2000 for i in range(LENGTH)] for s in range(3)]
QUANTIZED = "deepseek_v32", "deepseek_v4"
FLOAT = {"dtype": torch.float32, "dequantize": True, "progress": False}


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint):
    cases = [(model, False) for model in model_types()] + [(model, True) for model in QUANTIZED]
    return {case: tiny_checkpoint(*case) for case in cases}


@contextlib.contextmanager
def form(multi_head):
    """As on a GPU, where prompts take the multi-head form."""
    if not multi_head:
        yield
        return
    with (
        mock.patch.object(paged_attention.PagedAttention, "_has_multi_head_kernel", lambda *_: True),
        mock.patch.object(paged_attention, "multi_head_is_faster", lambda *_: True),
    ):
        yield


@torch.inference_mode()
def passes(model, of=PASSES):
    """Logits of all tokens of all passes."""
    size, cached, found = model.page_size, [0] * 3, []
    cache = model.make_cache(3 * -(-LENGTH // size), size)
    pages = [cache.allocator.allocate(-(-LENGTH // size)) for _ in range(3)]
    slots = cache.state_slots.allocate(3)
    for lens in of:
        chunks = [Chunk(n, cached[s], pages[s], slots[s]) for s, n in enumerate(lens) if n]
        tokens = [t for s, n in enumerate(lens) for t in TOKENS[s][cached[s] : cached[s] + n]]
        found.append(model(torch.tensor(tokens), prefill_batch(chunks, size, "cpu"), cache, all_tokens=True))
        cached = [c + n for c, n in zip(cached, lens)]
    return torch.cat(found)


def of_ranks(ranks, directories, options, of, way="queries", multi_head=False, shared_rows=rows.SHARED_ROWS):
    with split_by(way), form(multi_head), mock.patch.object(rows, "SHARED_ROWS", shared_rows):
        return [passes(load_model(directory, mesh=ranks, **options), of) for directory in directories]


@functools.cache
def alone(directory, multi_head, of):
    """The logits of one process."""
    with form(multi_head):
        return passes(load_model(directory, **FLOAT), of)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "multi_head", "of"),
    [
        ("queries", False, FEW),
        ("queries", False, PASSES),
        ("heads", False, FEW),
        ("queries", True, FEW),
    ],
)
def test_passes_are_those_of_one_process(checkpoints, way, multi_head, of):
    directories = [checkpoints[model, False] for model in model_types()]
    first, second = in_ranks(2, of_ranks, directories, FLOAT, of, way, multi_head)
    for model, directory, shared, other in zip(model_types(), directories, first, second):
        assert torch.equal(shared, other), model
        expected = alone(directory, multi_head, of)
        assert len(shared) == len(expected) == sum(map(sum, of))
        apart = (shared - expected).abs().amax(1) / expected.abs().max()
        # Near ties: now and then a token selects another key, and tokens behind it see a little of that.
        assert (apart > 2e-3).sum() <= 3 and (apart > 5e-5).sum() <= 20, model


def of_parts(ranks, *arguments):
    """Of shared rows and of whole ones, with shared experts as any other module in their place: a part of their
    channels for all rows, as of whole rows, and none of all channels, whose sums round elsewhere."""
    without_rows = mock.patch.object(moe, "takes", lambda module, name: name != "rows" and takes(module, name))
    with without_rows:
        return [of_ranks(ranks, *arguments, "heads", False, count) for count in (rows.SHARED_ROWS, 10**9)]


@pytest.mark.slow
def test_quantised_passes_have_the_bits_of_whole_rows(checkpoints):
    directories = [checkpoints[model, True] for model in QUANTIZED]
    options = {"dtype": torch.bfloat16, "progress": False}
    (first, whole), (second, _) = in_ranks(2, of_parts, directories, options, FEW)
    for model, shared, other, expected in zip(QUANTIZED, first, second, whole):
        assert torch.equal(shared, expected) and torch.equal(shared, other), model
