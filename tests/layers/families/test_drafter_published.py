"""The drafters that the published configurations describe have the published checkpoints' tensors."""

import json

import pytest
import torch

from dsa_layers.families.config import read_config
from dsa_layers.families.published import VENDORED
from dsa_layers.families.registry import family
from tests.layers.families.listings import parts, read_listing

CONFIGS = ["deepseek_v32", "glm_5", "glm_5_2", "deepseek_v4_flash", "deepseek_v4_pro"]


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


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4_pro"])
def test_listings(tmp_path, name):
    """As they were counted over the files: all tensors of the layer, by their names."""
    model, without = build(tmp_path, name)
    listing = read_listing(f"{name}_tensors.json")
    prefix = "mtp.0." if name == "deepseek_v4_pro" else "model.layers.61."
    assert without == {tensor for tensor in listing if tensor.startswith(prefix)}
    drafted = {model.name_of(tensor) for tensor in without if not model.skips(tensor)}
    assert all(tensor.startswith("drafter.") for tensor in drafted)
    weights = {tensor for tensor in drafted if not tensor.endswith("_scale_inv")}
    assert weights <= {n for n in parts(model) if n.startswith("drafter.")}
