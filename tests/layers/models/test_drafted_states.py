"""Later steps of GLM-5.2's drafter attend to the keys that its first step selected, in a prefill or in decoding."""

import pytest
import torch

from dsa_layers import DecodeBatch, SequenceBatch, load_model
from dsa_layers.batch.selected import Selected
from dsa_layers.engine import paged_attention
from dsa_layers.models.glm_moe_dsa import slots_of

# Two sequences with more keys than the drafter selects (TOP_K). Page numbers do not ascend within a sequence.
LENS, PAGES, PAGE = [150, 200], [[3, 0, 5, 1], [6, 2, 7, 4]], 64
TOKENS = torch.tensor([2 + i * i % 2000 for i in range(sum(LENS) + 1)])
TOP_K = 128


def paged(new, total):
    return SequenceBatch.paged(new, total, PAGES, PAGE)


def positions(slots, pages):
    """Return the set of positions of one row's slots >= 0 in a sequence with these pages."""
    slots = [slot for slot in slots.tolist() if slot >= 0]
    found = {pages.index(slot // PAGE) * PAGE + slot % PAGE for slot in slots}
    assert len(found) == len(slots)
    return found


@pytest.mark.parametrize(
    ("kv_cache", "most_read"),
    [("fp8", paged_attention.MOST_READ), pytest.param("fp8", 0, marks=pytest.mark.slow), ("model", 0)],
)
@torch.inference_mode()
def test_every_form_finds_the_same_keys(glm_checkpoint, kv_cache, most_read, monkeypatch):
    """The forms are passes over whole prompts, and over each prompt's last token or its last three."""
    monkeypatch.setattr(paged_attention, "MOST_READ", most_read)
    model = load_model(glm_checkpoint, kv_cache=kv_cache, drafter=True, progress=False)
    cache = model.drafter.make_cache(8, PAGE)
    states = model.states(TOKENS[:-1], SequenceBatch.without_cache(LENS))
    ends = torch.tensor(LENS).cumsum(0)
    whole = model.drafter(TOKENS[1:], states, paged(LENS, LENS), cache)[ends - 1]
    rows = ends - 1
    single = model.drafter(TOKENS[1:][rows], states[rows], paged([1, 1], LENS), cache)
    rows = torch.cat([torch.arange(end - 3, end) for end in ends.tolist()])
    lens = torch.tensor(LENS, dtype=torch.int32)
    drafts = DecodeBatch(paged(LENS, LENS).block_table, PAGE, lens, max(LENS), next_n=3)
    several = model.drafter(TOKENS[1:][rows], states[rows], drafts, cache)[torch.tensor([2, 5])]
    for i, (length, pages) in enumerate(zip(LENS, PAGES)):
        expected = positions(single.slots(slice(i, i + 1))[0], pages)
        assert len(expected) == TOP_K and max(expected) < length
        for states_of_form in (whole, several):
            got = states_of_form.slots(slice(None))
            assert got.dtype == torch.int32 and got.shape == (2, TOP_K)
            # Products with different numbers of rows may round differently, so near ties may be chosen differently.
            assert len(positions(got[i], pages) & expected) >= TOP_K - 2


def test_selections_with_bits_are_counted_in_positions():
    """A selection of the multi-head form has `bits`, and positions instead of slots."""
    batch = paged([2, 1], [130, 70])
    keys = torch.tensor([[0, 64, 129, -1], [1, 2, 3, 4], [63, 64, 69, -1]], dtype=torch.int32)
    selected = Selected(keys, batch, "positions", bits=torch.zeros(1))
    slots = slots_of(selected, batch, 4)(slice(None))
    assert torch.equal(slots, batch.slots_of(keys))
    assert slots[0].tolist() == [3 * 64, 0, 5 * 64 + 1, -1]
    assert slots[2].tolist() == [6 * 64 + 63, 2 * 64, 2 * 64 + 5, -1]


def test_wrong_further_steps_are_refused(glm_checkpoint):
    model = load_model(glm_checkpoint, dtype=torch.float32, dequantize=True, drafter=True, progress=False)
    cache = model.drafter.make_cache(8, PAGE)
    states = model.states(TOKENS[:5], SequenceBatch.without_cache([5]))
    batch = SequenceBatch.paged([5], [5], [[2]], PAGE)
    first = model.drafter(TOKENS[1:6], states, batch, cache)
    with pytest.raises(ValueError, match=r"^batch: a further step takes one token of each sequence .*, got \[2\]"):
        model.drafter(TOKENS[:2], first[:2], SequenceBatch.paged([2], [7], [[2]], PAGE), cache)
    with pytest.raises(ValueError, match=r"^cache: must be the first step's.* got none in this one"):
        model.drafter(TOKENS[:1], first[-1:], SequenceBatch.without_cache([1]))
    with pytest.raises(ValueError, match=r"^states: must be \[1, 512\]"):
        model.drafter(TOKENS[:1], first, SequenceBatch.paged([1], [6], [[2]], PAGE), cache)
