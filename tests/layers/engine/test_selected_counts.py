"""Sparse attention gets the number of valid columns of each token."""

import pytest
import torch

from dsa_layers.batch.decode_batch import DecodeBatch
from dsa_layers.batch.prefill import Chunk, prefill_batch
from dsa_layers.io.loading import load_model
from tests.layers.layers.calls import record

NEW = [150, 30]
PAGES = [range(6), range(6, 8)]


@pytest.fixture
def calls(monkeypatch):
    """(indices [T, K], counts [T] or None) of every call of sparse attention."""
    found = []

    def keep(indices, counts):
        if indices is not None:
            found.append((indices.flatten(1), counts))

    def decoding(*_, indices, topk_length, extra_indices_in_kvcache=None, extra_topk_length=None, **__):
        keep(indices, topk_length)
        keep(extra_indices_in_kvcache, extra_topk_length)

    record(monkeypatch, "flash_mla_sparse_fwd", seen=lambda *given, topk_length, **_: keep(given[2], topk_length))
    record(monkeypatch, "window_sparse_attention", seen=lambda *given, topk_length, **_: keep(given[6], topk_length))
    record(monkeypatch, "flash_mla_with_kvcache", seen=decoding)
    return found


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "deepseek_v4"])
def test_counts_are_the_numbers_of_selected_keys_in_prompts_and_steps(family, tiny_checkpoint, calls):
    """Selected keys come first in their row. There are no counts if every row is full."""
    model = load_model(tiny_checkpoint(family), progress=False)
    cache = model.make_cache(8, state_slots=2)
    kinds = []
    with torch.inference_mode():
        for earlier in ([0, 0], NEW):
            chunks = [Chunk(n, before, own, i) for i, (n, before, own) in enumerate(zip(NEW, earlier, PAGES))]
            model(torch.arange(1, 1 + sum(NEW)), prefill_batch(chunks, cache.page_size, "cpu"), cache)
            kinds.append(len(calls))
        table = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 7, -1, -1, -1, -1]], dtype=torch.int32)
        lengths = torch.tensor([2 * n + 1 for n in NEW], dtype=torch.int32)
        step = DecodeBatch(table, cache.page_size, lengths, 384, torch.arange(2, dtype=torch.int32))
        model(torch.tensor([5, 6]), step, cache)
    assert 0 < kinds[0] < kinds[1] < len(calls)
    for indices, counts in calls:
        selected = indices >= 0
        if counts is None:
            assert selected.all()
        else:
            counted = torch.arange(indices.shape[1]) < counts[:, None]
            # Lists of all entries: a token sees the first ones, and the list continues after them.
            assert torch.equal(selected, counted) or (selected.all() and family == "deepseek_v4")
    assert any(counts is not None and (counts < indices.shape[1]).any() for indices, counts in calls)
