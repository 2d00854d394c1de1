"""Needles among the keys of long contexts are found in every layer, and by every indexer of the shipped model."""

import copy

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
from tests.layers.layers.text_needles import Pass, indexers, mask, passes, planted_text, selected
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


TRAINED = 2048  # tokens: as long as the shipped model was trained
# Of each of its indexers, the drafter's last: which needles it finds, the least share of them, and of selected keys the
# least share that float64 selects without FP8. The least of seven texts: all needles; 0.978, 0.963 and, by the CPU,
# 0.949 to 0.951.
FINDS = (("files", 1.0, 0.975), ("names", 1.0, 0.96), ("names", 1.0, 0.94))


@pytest.fixture(scope="module")
def texts():
    """(what is planted, a `Pass` of each indexer, the indexers with weights that are not quantised) of three texts."""
    model = load_model(SHIPPED_MODEL, drafter=True, progress=False)
    plain = load_model(SHIPPED_MODEL, drafter=True, progress=False, dtype=torch.float32, dequantize=True)
    assert model.config.max_position_embeddings == TRAINED and model.config.index_topk == 128
    assert len(indexers(model)) == len(FINDS)
    made = []
    for seed in range(3):
        # Behind the last needle there are more tokens than are selected: the latest keys have no needle.
        text = planted_text(Tokenizer(SHIPPED_MODEL), TRAINED, seed, clear=model.config.index_topk)
        assert len(text.tokens) == TRAINED and min(query - key for query, key in text.files) > model.config.index_topk
        calls = passes(model, text.tokens)
        assert [call.indexer for call in calls] == indexers(model)
        made.append((text, calls, indexers(plain)))
    return made


def selected_at_the_end(text, calls, plain, layer, broken=lambda call: call):
    """Of all queries that ask for a needle."""
    return selected(broken(calls[layer]), plain[layer], TRAINED - text.files[0][0])


@pytest.mark.parametrize("layer", range(len(FINDS)))
def test_every_indexer_of_the_shipped_model_finds_needles(texts, layer):
    """Six places of a text as long as it was trained for, where it selects 128 of 2048 keys: the first layer, whose
    queries and keys know one token each, finds from an indented line break the tokens that begin the text's files; the
    second one finds what a name goes on with from each token of it, and so does the drafter. Which token the first
    layer finds at any distance is this checkpoint's: the one before found arrows from `self`, and lacked a third of
    these. Heads of negative weight lower the scores of distant keys there, and those of such tokens less."""
    needles, least, equal = FINDS[layer]
    for text, calls, plain in texts:
        result = selected_at_the_end(text, calls, plain, layer)
        assert torch.equal(result.own, mask(calls[layer].indices[-len(result.own) :], TRAINED))
        found, keys = result.found(getattr(text, needles)), result.equal()
        assert min(found) >= least, found  # the layer's, float64's, both
        assert keys[0] > 0.999 and keys[1] >= equal, keys


def test_the_first_layer_finds_no_names(texts):
    """Its keys do not know what stands before them: names are as if they were not asked for."""
    for text, calls, plain in texts:
        assert max(selected_at_the_end(text, calls, plain, 0).found(text.names)) < 0.06


def _without_rope(call: Pass) -> Pass:
    cos, sin, batch = call.rest
    return call._replace(rest=(torch.ones_like(cos), torch.zeros_like(sin), batch))


def _with_weights(call: Pass, weights: torch.Tensor) -> Pass:
    indexer = copy.deepcopy(call.indexer)
    indexer.weights_proj.weight.data = weights.to(torch.bfloat16).contiguous()
    return call._replace(indexer=indexer)


def _without_head_weights(call: Pass) -> Pass:
    """All heads count the same."""
    weights = call.indexer.weights_proj.weight
    return _with_weights(call, weights.float().mean(0, keepdim=True).expand_as(weights))


def _from_the_worst(call: Pass) -> Pass:
    return _with_weights(call, -call.indexer.weights_proj.weight)


@pytest.mark.parametrize("layer", range(len(FINDS)))
def test_wrong_scores_are_seen_in_every_layer(texts, layer):
    """The bounds above can fail, where float64 scores of the same bytes would be as wrong."""
    needles, least, equal = FINDS[layer]
    for broken in (_without_rope, _without_head_weights, _from_the_worst):
        result = selected_at_the_end(*texts[0], layer, broken)
        assert result.equal()[1] < 0.9 < equal, broken.__name__
    assert result.found(getattr(texts[0][0], needles))[0] < 0.5 < least  # of the last one


# Names that the text does not have otherwise, and how deep they are in it.
NAMES = (("velocity_of_zebra", 0.0), ("quux_waldo_garply", 0.3), ("ZirconBuffer_pelican", 0.8))


def test_the_shipped_model_finds_a_name():
    """A name that occurs once, anywhere in as long a text as the model was trained for, goes on as it did there. With
    the latest keys in place of the selected ones the model does not know it."""
    model, tokenizer = load_model(SHIPPED_MODEL, progress=False), Tokenizer(SHIPPED_MODEL)
    hay = tokenizer.encode(HELD_OUT_TEXT.read_text(encoding="utf-8"))
    for name, depth in NAMES:
        needle, asked = (tokenizer.encode(text)[1:] for text in (f"\n\n{name} = 4096\n\n", f"\n    return {name[:-3]}"))
        room = TRAINED - len(needle) - len(asked)
        at = 1 + int(depth * room)
        tokens = torch.tensor(hay[:at] + needle + hay[at:room] + asked)
        assert _next(model, tokenizer, tokens, name), f"{name} at {at}"
        with latest_keys(model):
            assert not _next(model, tokenizer, tokens, name)


def _next(model, tokenizer, tokens, name):
    """Whether the most probable token is what the name goes on with."""
    with torch.no_grad():
        logits = model(tokens, SequenceBatch.without_cache([len(tokens)]))
    return name[-3:].startswith(tokenizer.decode([int(logits[-1].argmax())]))
