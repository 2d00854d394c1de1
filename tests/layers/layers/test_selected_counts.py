"""Attention to selected keys is told how many of a token's columns count."""

import pytest
import torch

import dsa
from dsa_layers.batch.decode_batch import DecodeBatch
from dsa_layers.batch.prefill import Chunk, prefill_batch
from dsa_layers.checkpoint.loading import load_model

NEW = [150, 30]
PAGES = [range(6), range(6, 8)]


@pytest.fixture
def selections(monkeypatch):
    """(indices [T, K], counts [T] or None) of every call."""
    found = []

    def note(name, pairs):
        op = getattr(dsa, name)

        def noting(*arguments, **options):
            for place, keyword, counts in pairs:
                indices = arguments[place] if place is not None else options.get(keyword)
                if indices is not None:
                    found.append((indices.flatten(1), options[counts]))
            return op(*arguments, **options)

        monkeypatch.setattr(dsa, name, noting)

    note("flash_mla_sparse_fwd", [(2, None, "topk_length")])
    note("window_sparse_attention", [(6, None, "topk_length")])
    extra = (None, "extra_indices_in_kvcache", "extra_topk_length")
    note("flash_mla_with_kvcache", [(None, "indices", "topk_length"), extra])
    return found


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "deepseek_v4"])
def test_of_prompts_and_of_steps(family, tiny_checkpoint, selections):
    """All that are selected come first, and count; of tokens without fewer than there are columns nothing is said."""
    model = load_model(tiny_checkpoint(family), progress=False)
    cache = model.make_cache(8, state_slots=2)
    kinds = []
    with torch.inference_mode():
        for earlier in ([0, 0], NEW):
            chunks = [Chunk(n, before, own, i) for i, (n, before, own) in enumerate(zip(NEW, earlier, PAGES))]
            model(torch.arange(1, 1 + sum(NEW)), prefill_batch(chunks, cache.page_size, "cpu"), cache)
            kinds.append(len(selections))
        table = torch.tensor([[0, 1, 2, 3, 4, 5], [6, 7, -1, -1, -1, -1]], dtype=torch.int32)
        lengths = torch.tensor([2 * n + 1 for n in NEW], dtype=torch.int32)
        step = DecodeBatch(table, cache.page_size, lengths, 384, torch.arange(2, dtype=torch.int32))
        model(torch.tensor([5, 6]), step, cache)
    assert 0 < kinds[0] < kinds[1] < len(selections)
    for indices, counts in selections:
        selected = indices >= 0
        if counts is None:
            assert selected.all()
        else:
            counted = torch.arange(indices.shape[1]) < counts[:, None]
            # Lists of all entries, of which a token sees the first ones, go on behind these.
            assert torch.equal(selected, counted) or (selected.all() and family == "deepseek_v4")
    assert any(counts is not None and (counts < indices.shape[1]).any() for indices, counts in selections)
