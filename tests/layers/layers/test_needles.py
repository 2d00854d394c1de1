"""Needles among the keys of long contexts are found in every layer, and by the shipped model."""

import pytest
import torch
from torch import nn

import dsa
from dsa_bench.e2e.stacks import stack
from dsa_layers import SHIPPED_MODEL
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.command.compare import HELD_OUT_TEXT
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.evaluation.selections import latest_keys
from dsa_layers.io.loading import load_model
from dsa_layers.io.tokenizer import Tokenizer
from dsa_layers.layers import key_selection
from tests.bench.small_stacks import FEWER, SMALL
from tests.needles import Haystack, planted

SHARES = (0.0, 0.1, 0.3333, 0.5, 0.77, 0.99)
# Layers with an indexer in each stack.
SELECT = {"V4-Flash": 2, "GLM-5.2": 1, "V3.2": 4}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", SELECT)
def test_every_layer_finds_needles(name, fused, monkeypatch):
    for name_of_limit in ("FUSED_KEYS", "FUSED_TOKENS") if fused else ():
        monkeypatch.setattr(key_selection, name_of_limit, 1)
    model = stack(name, "cpu", **SMALL, **FEWER[name])
    hay = Haystack(model, 8192 + 70, "cpu")
    with planted(SHARES) as finds:
        hay.decode()
        assert finds.selections == SELECT[name]
        with monkeypatch.context() as patch:
            if fused:
                patch.setattr(dsa, "topk_indices", lambda *_, **__: pytest.fail("scores are written"))
            hay.prefill(20)
    assert finds.selections == 2 * SELECT[name] and finds.lacking == 0
    assert finds.error < 1e-5


TRAINED, TOP_K = 2048, 128  # the length of the texts that the shipped model was trained with, and its index_topk


@pytest.fixture(scope="module")
def model():
    model = load_model(SHIPPED_MODEL, drafter=True, progress=False)
    assert model.config.max_position_embeddings == TRAINED and model.config.index_topk == TOP_K
    return model


@pytest.fixture(scope="module")
def hay():
    return Tokenizer(SHIPPED_MODEL).encode(HELD_OUT_TEXT.read_text(encoding="utf-8"))


def attentions(model):
    """Those of every layer and of the drafter."""
    return [block.self_attn for block in (*model.model.layers, model.drafter.block)]


def largest_scores(indexer, x, qr, queries):
    """bool [queries, T]: the keys with the TOP_K largest scores in float64, for the last queries of one sequence."""
    length, norm = len(x), indexer.k_norm

    def rotate(v, position):
        angle = position.double()[..., None] * 1e4 ** (-torch.arange(32).double() / 32)
        a, b, rest = v.split((32, 32, v.shape[-1] - 64), -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest), -1)

    x, last, position = x.double(), slice(length - queries, None), torch.arange(length)
    q = (qr[last].double() @ indexer.wq_b.weight.double().T).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = x @ indexer.wk.weight.double().T
    k = nn.functional.layer_norm(k, (indexer.head_dim,), norm.weight.double(), norm.bias.double(), norm.eps)
    weights = x[last] @ indexer.weights_proj.weight.double().T
    products = torch.einsum("thd,sd->ths", rotate(q, position[last, None]), rotate(k, position))
    scores = torch.einsum("th,ths->ts", weights, products.relu())
    visible = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    return mask(scores.masked_fill(~visible, -torch.inf).topk(TOP_K).indices, length)


def mask(indices, length):
    return torch.zeros(len(indices), length, dtype=torch.bool).scatter_(1, indices.long(), True)


@pytest.mark.slow
def test_every_indexer_of_the_shipped_model_selects_as_in_float64(model, hay, monkeypatch):
    """The indexers select in FP8. Least shares of equal keys in seven texts: 0.978, 0.963, and 0.949 in the drafter."""
    calls, tokens, queries, pick = [], torch.tensor(hay[:TRAINED]), 100, PagedAttention._pick

    def recorded(attention, x, latents, step):
        calls.append((attention, x, latents.queries, step.angles, pick(attention, x, latents, step)))
        return calls[-1][-1]

    monkeypatch.setattr(PagedAttention, "_pick", recorded)
    batch = SequenceBatch.without_cache([TRAINED])
    with torch.no_grad():
        states = model.states(tokens, batch)
        following = torch.cat((tokens[1:], model.logits(states[-1:]).argmax(-1)))
        model.drafter(following, states, batch)
    plain = load_model(SHIPPED_MODEL, drafter=True, progress=False, dtype=torch.float32, dequantize=True)
    assert [call[0] for call in calls] == attentions(model)
    for (attention, x, qr, (cos, sin), selected), exact, least in zip(calls, attentions(plain), (0.975, 0.96, 0.94)):
        wanted = largest_scores(exact.indexer, x, qr, queries)
        assert (mask(selected[-queries:], TRAINED) & wanted).sum() >= least * wanted.sum()
        # Without rope the selection is another one, so the bound can fail.
        without = attention.indexer.select(x, qr, torch.ones_like(cos), torch.zeros_like(sin), batch)
        assert (mask(without[-queries:], TRAINED) & wanted).sum() < 0.9 * wanted.sum()


# A name that the text does not have otherwise, and its depth in the text.
NAMES = [
    ("velocity_of_zebra", 0.0),
    pytest.param("quux_waldo_garply", 0.3, marks=pytest.mark.slow),
    pytest.param("ZirconBuffer_pelican", 0.8, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "depth"), NAMES)
def test_the_shipped_model_completes_a_distant_name(model, hay, name, depth):
    """The name occurs once before, at any depth of the longest text. With the latest keys in place of the selected ones
    the model does not know it."""
    tokenizer = Tokenizer(SHIPPED_MODEL)
    needle, asked = (tokenizer.encode(text)[1:] for text in (f"\n\n{name} = 4096\n\n", f"\n    return {name[:-3]}"))
    room = TRAINED - len(needle) - len(asked)
    at = 1 + int(depth * room)
    tokens = torch.tensor(hay[:at] + needle + hay[at:room] + asked)

    @torch.no_grad()
    def following():
        """The most probable token."""
        logits = model(tokens, SequenceBatch.without_cache([len(tokens)]))
        return tokenizer.decode([int(logits[-1].argmax())])

    assert name[-3:].startswith(following())
    with latest_keys(model):
        assert not name[-3:].startswith(following())
