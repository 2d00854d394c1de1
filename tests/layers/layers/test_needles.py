"""In long contexts, every layer's indexer selects planted keys, the needles."""

import pytest

import dsa
from dsa_bench.e2e.stacks import stack
from dsa_layers.layers import key_selection
from tests.bench.small_stacks import FEWER, SMALL
from tests.needles import Haystack, planted

SHARES = (0.0, 0.1, 0.3333, 0.5, 0.77, 0.99)  # relative positions of the needles; 0 is the first key
# stack -> number of its layers with an indexer
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
