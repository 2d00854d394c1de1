"""The models and drafters that the published configurations describe have the published checkpoints' tensors."""

import math

import pytest
import torch

from dsa_layers.io.manifest import published_manifest
from dsa_layers.models.registry import family
from tests.layers.models.configs import read
from tests.layers.models.listings import parts, read_listing


def build(directory, name, **changes):
    """The model with its drafter, and the stored tensors that it skips without one."""
    config = read(directory, name, **changes)
    with torch.device("meta"):
        model = family(config.model_type).model(config, None)
        without = {stored for stored in published_manifest(config) if model.skips(stored)}
        model.drafter = family(config.model_type).drafter(model)
    return model, without


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("deepseek_v32", 671_877_944_064),
        ("glm_5_2", 743_377_019_904),
        ("deepseek_v4_flash", 284e9),
        pytest.param("glm_5", 744e9, marks=pytest.mark.slow),
        pytest.param("deepseek_v4_pro", 1.6e12, marks=pytest.mark.slow),
    ],
)
def test_the_model_reads_every_tensor_but_copies(tmp_path, name, parameters):
    model, without = build(tmp_path, name)
    manifest = published_manifest(model.config)
    ours = {name: tuple(tensor.shape) for name, tensor in parts(model).items()}
    assert sorted(ours) == sorted(model.name_of(stored) for stored in manifest if not model.skips(stored))
    copies = {stored.rpartition(".")[0].rpartition(".")[2] for stored in manifest if model.skips(stored)}
    assert copies == ({"embed_tokens", "head"} if name == "deepseek_v32" else set())
    drafter = {name for name in ours if "drafter." in name}
    assert {model.name_of(stored) for stored in without if not model.skips(stored)} == drafter
    uncounted = ("_scale_inv", "tid2eid")
    counted = {name: shape for name, shape in ours.items() if name not in drafter and not name.endswith(uncounted)}
    assert sum(map(math.prod, counted.values())) == pytest.approx(parameters, rel=1e-12 if parameters % 1e9 else 0.02)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("deepseek_v32", "model.layers.61."), pytest.param("deepseek_v4_pro", "mtp.0.", marks=pytest.mark.slow)],
)
def test_the_drafter_reads_all_tensors_of_its_layer(tmp_path, name, prefix):
    _, without = build(tmp_path, name)
    assert without == {tensor for tensor in read_listing(f"{name}_tensors.json") if tensor.startswith(prefix)}
