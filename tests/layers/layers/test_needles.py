"""Every layer, and the shipped model, finds needles among the keys of long contexts."""

import pytest
import torch

import dsa
from dsa_bench.e2e.stacks import stack
from dsa_layers import SHIPPED_MODEL
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.command.parser import HELD_OUT_TEXT
from dsa_layers.evaluation import latest_keys
from dsa_layers.io.loading import load_model
from dsa_layers.io.tokenizer import Tokenizer
from dsa_layers.layers import indexer
from tests.bench.small_stacks import FEWER, SMALL
from tests.needles import Haystack, planted

SHARES = (0.0, 0.1, 0.3333, 0.5, 0.77, 0.99)
# Layers with an indexer in each stack.
SELECT = {"V4-Flash": 2, "GLM-5.2": 1, "V3.2": 4}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", SELECT)
def test_every_layer_finds_needles(name, fused, monkeypatch):
    for name_of_limit in ("FUSED_KEYS", "FUSED_TOKENS") if fused else ():
        monkeypatch.setattr(indexer, name_of_limit, 1)
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


TRAINED = 2048  # the length of the texts that the shipped model was trained with


@pytest.fixture(scope="module")
def model():
    return load_model(SHIPPED_MODEL, progress=False)


# A name that the text does not have otherwise, and its depth in the text.
NAMES = [
    ("velocity_of_zebra", 0.0),
    pytest.param("quux_waldo_garply", 0.3, marks=pytest.mark.slow),
    pytest.param("ZirconBuffer_pelican", 0.8, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "depth"), NAMES)
def test_the_shipped_model_completes_a_distant_name(model, name, depth):
    """The name occurs once before, at any depth of the longest text. With the latest keys in place of the selected ones
    the model does not know it."""
    tokenizer = Tokenizer(SHIPPED_MODEL)
    hay = tokenizer.encode(HELD_OUT_TEXT.read_text(encoding="utf-8"))
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
