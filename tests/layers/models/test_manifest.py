"""Manifests, which families derive from their models, against the tensors of published checkpoints."""

import pytest

from dsa_layers.io.manifest import published_manifest
from dsa_layers.io.unfilled import unfilled
from dsa_layers.models.config_file import read_config
from dsa_layers.models.precision import Precision
from dsa_layers.models.registry import FAMILIES, family
from tests.layers.models.configs import read
from tests.layers.models.listings import parts, read_listing


def manifest(directory, name, **changes):
    config = read(directory, name, **changes)
    return published_manifest(config)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4_pro"])
def test_manifest_is_the_published_listing(tmp_path, name):
    assert manifest(tmp_path, name) == read_listing(f"{name}_tensors.json")


def test_without_quantisation_weights_are_bf16_and_have_no_scales(tmp_path):
    listing = read_listing("deepseek_v32_tensors.json")
    expected = {
        name: (shape, "BF16" if dtype == "F8_E4M3" else dtype)
        for name, (shape, dtype) in listing.items()
        if not name.endswith("_scale_inv")
    }
    assert manifest(tmp_path, "deepseek_v32", quantization_config=None) == expected


@pytest.mark.parametrize(
    ("name", "first", "second", "changes"),
    [
        ("deepseek_v32", "model.layers.61.", "model.layers.62.", {}),
        ("deepseek_v4_flash", "mtp.0.", "mtp.1.", {"compress_ratios": [128] * 43}),
    ],
)
def test_all_multi_token_prediction_layers_have_the_same_tensors(tmp_path, name, first, second, changes):
    one = manifest(tmp_path, name, num_nextn_predict_layers=1, **changes)
    two = manifest(tmp_path, name, num_nextn_predict_layers=2, **changes)
    added = {second + tensor.removeprefix(first): one[tensor] for tensor in one if tensor.startswith(first)}
    assert added and two == one | added


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_model_finds_its_tensors_by_their_stored_names(tiny_checkpoint, model_type):
    of_family, config = family(model_type), read_config(tiny_checkpoint(model_type))
    with unfilled():
        model = of_family.model(config, Precision.of(config))
        if of_family.drafter is not None:
            model.drafter = of_family.drafter(model)
    for name in parts(model):
        stored = model.stored_name(name)
        assert model.name_of(stored) == name and not model.skips(stored)
