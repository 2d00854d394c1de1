"""Manifests (io/published.py), models and drafters of published configurations have the tensors of the checkpoints."""

import math
from dataclasses import replace

import pytest
import torch

from dsa_layers.io.loading import unfilled_model
from dsa_layers.io.published import published_manifest
from dsa_layers.models.family import family, read_config
from dsa_layers.models.precision import Precision
from tests.layers.models.configs import read
from tests.layers.models.listings import parts, read_listing


def manifest_of(config):
    return {name: (info.shape, info.dtype) for name, info in published_manifest(config).items()}


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4_pro"])
def test_manifest_is_the_published_listing(tmp_path, name):
    assert manifest_of(read(tmp_path, name)) == read_listing(f"{name}_tensors.json")


def test_without_quantisation_weights_are_bf16_and_have_no_scales(tmp_path):
    listing = read_listing("deepseek_v32_tensors.json")
    expected = {
        name: (shape, "BF16" if dtype == "F8_E4M3" else dtype)
        for name, (shape, dtype) in listing.items()
        if not name.endswith("_scale_inv")
    }
    assert manifest_of(read(tmp_path, "deepseek_v32", quantization_config=None)) == expected


@pytest.mark.parametrize(
    ("name", "first", "second", "changes"),
    [
        ("deepseek_v32", "model.layers.61.", "model.layers.62.", {}),
        ("deepseek_v4_flash", "mtp.0.", "mtp.1.", {"compress_ratios": [128] * 43}),
    ],
)
def test_all_multi_token_prediction_layers_have_the_same_tensors(tmp_path, name, first, second, changes):
    one, two = (manifest_of(read(tmp_path, name, num_nextn_predict_layers=n, **changes)) for n in (1, 2))
    added = {second + tensor.removeprefix(first): one[tensor] for tensor in one if tensor.startswith(first)}
    assert added and two == one | added


def test_the_model_finds_its_tensors_by_their_stored_names(directory, model_type):
    config = read_config(directory)
    model = unfilled_model(config, Precision.of(config), drafter=family(model_type).drafter is not None)
    for name in parts(model):
        stored = model.stored_name(name)
        assert model.name_of(stored) == name and not model.skips(stored)


def build(directory, name):
    """Return the model with its drafter, and the names of the stored tensors that it skips without a drafter."""
    config = read(directory, name)
    model = unfilled_model(config, None)
    without = {stored for stored in manifest_of(config) if model.skips(stored)}
    with torch.device("meta"):
        model.drafter = family(config.model_type).drafter(model)
    return model, without


@pytest.mark.parametrize(
    ("name", "parameters"),  # multiples of 10^9 are published sizes, which are rounded
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
    manifest = manifest_of(model.config)
    ours = {name: tuple(tensor.shape) for name, tensor in parts(model).items()}
    assert sorted(ours) == sorted(model.name_of(stored) for stored in manifest if not model.skips(stored))
    copies = {stored.rpartition(".")[0].rpartition(".")[2] for stored in manifest if model.skips(stored)}
    assert copies == ({"embed_tokens", "head"} if name == "deepseek_v32" else set())
    drafter = {name for name in ours if "drafter." in name}
    assert {model.name_of(stored) for stored in without if not model.skips(stored)} == drafter
    uncounted = ("_scale_inv", "tid2eid")
    counted = {name: shape for name, shape in ours.items() if name not in drafter and not name.endswith(uncounted)}
    assert sum(map(math.prod, counted.values())) == pytest.approx(parameters, rel=1e-12 if parameters % 1e9 else 0.02)


def test_fp4_experts_take_what_their_files_take_within_2_percent(tmp_path):
    config = read(tmp_path, "deepseek_v4_flash")
    sizes = {"I8": 1, "F8_E8M0": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I64": 8}
    model = unfilled_model(config, replace(Precision.of(config), fp4_experts=True))
    stored = {n: e for n, e in manifest_of(config).items() if not model.skips(n)}
    tensors = parts(model)
    for word in (".experts.", ""):
        in_files = sum(math.prod(shape) * sizes[dtype] for n, (shape, dtype) in stored.items() if word in n)
        held = sum(tensor.nbytes for name, tensor in tensors.items() if word in name)
        assert abs(held / in_files - 1) < 0.02
    assert 140e9 < held < 170e9


def test_glm_5_2_has_the_published_totals(tmp_path):
    """Only the gates' biases are F32, in 75 layers with experts and the MTP layer. Source: vendored/README.md."""
    model = unfilled_model(read(tmp_path, "glm_5_2"), None)
    manifest = manifest_of(model.config)
    sizes = {name: math.prod(shape) for name, (shape, _) in manifest.items()}
    mtp = sum(size for name, size in sizes.items() if name.startswith("model.layers.78."))
    assert (len(sizes), sum(sizes.values()), mtp) == (59_585, 753_329_940_480, 9_952_920_576)
    assert {dtype for _, dtype in manifest.values()} == {"BF16", "F32"}
    assert sum(size for name, size in sizes.items() if manifest[name][1] == "F32") == 19_456 == 76 * 256
    assert sum(name.endswith("indexer.wk.weight") for name in parts(model)) == 21


def test_glm_5_3_flash_has_the_published_numbers_of_tensors(tmp_path):
    """347 tensors of the published files are of the part for images. Source: vendored/README.md."""
    names = [*manifest_of(read(tmp_path, "glm5_next"))]
    assert len(names) == 76_108 - 347
    assert sum(name.startswith("model.layers.45.") for name in names) == 1_760  # the drafter


def test_glm_5_in_fp8_keeps_the_heads_the_gates_and_the_indexers_weights_proj(tmp_path):
    quantization = {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128]}
    state = parts(unfilled_model(read(tmp_path, "glm_5_2", quantization_config=quantization), None))
    fp8 = {name for name, t in state.items() if t.dtype == torch.float8_e4m3fn}
    matrices = {name for name, t in state.items() if t.dim() == 2 and not name.endswith("_scale_inv")}
    kept = ("lm_head.weight", "embed_tokens.weight", "mlp.gate.weight", "weights_proj.weight")
    assert fp8 == {name for name in matrices if not name.endswith(kept)}
    # 5 projections per attention layer, 2 per indexer, 3 per dense MLP, and 3 per expert (256 routed and one shared)
    assert len(fp8) == 78 * 5 + 21 * 2 + 3 * 3 + 75 * 3 * 257
    for name in fp8:
        rows, columns = state[name].shape
        assert state[f"{name}_scale_inv"].shape == (-(-rows // 128), -(-columns // 128))
