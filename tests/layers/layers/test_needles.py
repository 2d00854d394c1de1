"""Needles among the keys of long contexts are found in every layer; and what the shipped model's indexer finds."""

import pytest
import torch

import dsa
from dsa_bench.e2e.stacks import stack
from dsa_layers import SHIPPED_MODEL
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.checkpoint.loading import load_model
from dsa_layers.command.compare import HELD_OUT_TEXT
from dsa_layers.evaluation.selections import latest_keys
from dsa_layers.generation.tokenizer import Tokenizer
from dsa_layers.layers import key_selection
from tests.bench.small_stacks import FEWER, SMALL
from tests.needles import Haystack, planted

SHARES = (0.0, 0.1, 0.3333, 0.5, 0.77, 0.99)
# Layers with an indexer of the stacks.
SELECT = {"V4-Flash": 2, "GLM-5.2": 1, "V3.2": 4}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", SELECT)
def test_every_layer_finds_needles(name, fused, monkeypatch):
    monkeypatch.setattr(key_selection, "FUSED_PAGED", range(1, 2**20) if fused else ())
    for name_of_limit in ("FUSED_KEYS", "FUSED_TOKENS") if fused else ():
        monkeypatch.setattr(key_selection, name_of_limit, 1)
    if fused:
        monkeypatch.setattr(dsa, "topk_indices", lambda *_, **__: pytest.fail("scores are written"))
    model = stack(name, "cpu", **SMALL, **FEWER[name])
    hay = Haystack(model, 8192 + 70, "cpu")
    with planted(SHARES) as finds:
        hay.decode()
        assert finds.selections == SELECT[name]
        hay.prefill(20)
    assert finds.selections == 2 * SELECT[name] and finds.lacking == 0
    assert finds.error < 1e-5


def test_a_needle_that_is_not_there_is_missed():
    """Without keys that point the queries' way the same places are not selected: the test can fail."""
    model = stack("GLM-5.2", "cpu", **SMALL, **FEWER["GLM-5.2"])
    hay = Haystack(model, 8192 + 70, "cpu")
    with pytest.MonkeyPatch.context() as patch, planted(SHARES) as finds:
        patch.setattr("tests.needles._needles", lambda q, w, count: torch.zeros(count, 128).to(torch.float8_e4m3fn))
        hay.decode()
    assert finds.lacking > 0


# Names that the text does not have otherwise, and how deep they are in it.
NAMES = (("velocity_of_zebra", 0.0), ("quux_waldo_garply", 0.3), ("ZirconBuffer_pelican", 0.8))
TRAINED = 2048  # tokens: as long as the shipped model was trained


def test_the_shipped_model_finds_a_name(monkeypatch):
    """A name that occurs once, anywhere in as long a text as the model was trained for, goes on as it did there: the
    second layer's indexer selects tokens of the needle, 128 of 2048 keys as it is. With the latest keys in place of the
    selected ones the model does not know it."""
    model, tokenizer = load_model(SHIPPED_MODEL, progress=False), Tokenizer(SHIPPED_MODEL)
    assert model.config.max_position_embeddings == TRAINED and model.config.index_topk == 128
    hay = tokenizer.encode(HELD_OUT_TEXT.read_text(encoding="utf-8"))
    found, select = [], dsa.topk_indices
    monkeypatch.setattr(dsa, "topk_indices", lambda *given, **o: found.append(select(*given, **o)) or found[-1])
    for name, depth in NAMES:
        needle, asked = (tokenizer.encode(text)[1:] for text in (f"\n\n{name} = 4096\n\n", f"\n    return {name[:-3]}"))
        room = TRAINED - len(needle) - len(asked)
        at = 1 + int(depth * room)
        tokens = torch.tensor(hay[:at] + needle + hay[at:room] + asked)
        found.clear()
        assert _next(model, tokenizer, tokens, name), f"{name} at {at}"
        selected = found[-1][-1]
        there = ((selected >= at) & (selected < at + len(needle))).sum() / len(needle)
        assert len(found) == 2 and there > 2 * model.config.index_topk / TRAINED
        with latest_keys(model):
            assert not _next(model, tokenizer, tokens, name)


def _next(model, tokenizer, tokens, name):
    """Whether the most probable token is what the name goes on with."""
    with torch.no_grad():
        logits = model(tokens, SequenceBatch.without_cache([len(tokens)]))
    return name[-3:].startswith(tokenizer.decode([int(logits[-1].argmax())]))
