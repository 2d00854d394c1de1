"""The benchmark of whole models on one GPU, with small models on a CPU."""

import pytest

from dsa_bench.e2e import one_gpu
from dsa_layers.models.deepseek_v32 import TINY_CHANGES

LAYERS = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
SMALL = {
    "A.X-K2-Light": TINY_CHANGES | LAYERS,
    "Hy4, 34 layers": TINY_CHANGES | LAYERS | {"indexer_types": ["full", "shared"], "layer_types": None},
}


@pytest.mark.parametrize("name", one_gpu.MODELS)
def test_rows_of_small_models(name, monkeypatch, tmp_path):
    file, fields = one_gpu.MODELS[name]
    small = {key: value for key, value in (fields | SMALL[name]).items() if key != "first_k_dense_replace"}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
    monkeypatch.setitem(one_gpu.MODELS, name, (file, small | ids))
    for attribute, value in (("PROMPTS", (20,)), ("SEQUENCES", (2,)), ("CONTEXT", 8), ("STEPS", 3), ("CHUNK", 16)):
        monkeypatch.setattr(one_gpu, attribute, value)
    load, prefill, decode = one_gpu.rows([name], lambda line: None, "cpu", str(tmp_path))
    assert load["GB"] > 0.001 and load["seconds"] > 0
    assert prefill["shape"] == f"{name}: prefill 1 x 20" and prefill["tokens_s"] > 0
    assert decode["shape"] == f"{name}: decode 2 x 8" and "tokens_s" in decode
    assert not any(tmp_path.iterdir())
