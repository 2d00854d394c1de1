"""The drafters that the published configurations describe have the published checkpoints' tensors."""

import json

import pytest
import torch

from dsa_layers.families.config import read_config
from dsa_layers.families.published import VENDORED
from dsa_layers.families.registry import family
from tests.layers.families.listings import parts, read_listing

CONFIGS = [
    *("deepseek_v32", "glm_5_2", "deepseek_v4_flash"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("glm_5", "deepseek_v4_pro")),
]


def build(directory, name, **changes):
    fields = json.loads((VENDORED / f"{name}_config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | changes))
    config = read_config(directory)
    with torch.device("meta"):
        model = family(config.model_type).model(config, None)
        without = {stored for stored in family(config.model_type).manifest(config) if model.skips(stored)}
        model.drafter = family(config.model_type).drafter(model)
    return model, without


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes(tmp_path, name):
    """Experts of FP8, of which each weight has its shape. Of what a model without a drafter skips copies are left."""
    changes = {"expert_dtype": "fp8"} if name.startswith("deepseek_v4") else {}
    model, without = build(tmp_path, name, **changes)
    assert model.config.num_nextn_predict_layers == 1
    manifest = family(model.config.model_type).manifest(model.config)
    stored = {tensor: entry for tensor, entry in manifest.items() if not model.skips(tensor)}
    is_fp8 = {torch.float8_e4m3fn: True}
    ours = {n: (tuple(t.shape), is_fp8.get(t.dtype, False)) for n, t in parts(model).items()}
    assert ours == {model.name_of(n): (shape, dtype == "F8_E4M3") for n, (shape, dtype) in stored.items()}
    copies = {tensor.rpartition(".")[0].rpartition(".")[2] for tensor in manifest.keys() - stored.keys()}
    assert copies == ({"embed_tokens", "head"} if name == "deepseek_v32" else set())
    assert {model.name_of(tensor) for tensor in without & stored.keys()} == {n for n in ours if "drafter." in n}


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("deepseek_v32", "model.layers.61."), pytest.param("deepseek_v4_pro", "mtp.0.", marks=pytest.mark.slow)],
)
def test_the_drafter_is_all_of_its_layer_in_the_files(tmp_path, name, prefix):
    _, without = build(tmp_path, name)
    assert without == {tensor for tensor in read_listing(f"{name}_tensors.json") if tensor.startswith(prefix)}
