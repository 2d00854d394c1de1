"""The models that the published configurations describe have the published checkpoints' tensors."""

import json
import math

import pytest
import torch

from dsa_layers.families.config import read_config
from dsa_layers.families.glm_moe_dsa.manifest import glm_moe_dsa_tensor_manifest
from dsa_layers.families.glm_moe_dsa.model import GlmMoeDsaForCausalLM
from dsa_layers.families.published import VENDORED
from tests.layers.families.listings import parts

# Counted by hand from the architecture.
HIDDEN, LAYERS, DENSE, EXPERTS = 6144, 78, 3, 256
VOCABULARY = 154880 * HIDDEN
QUERIES = HIDDEN * 2048 + 2048 + 2048 * 64 * (192 + 64)
KEYS_AND_VALUES = HIDDEN * (512 + 64) + 512 + 512 * 64 * (192 + 256)
ATTENTION = QUERIES + KEYS_AND_VALUES + 64 * 256 * HIDDEN
INDEXER = 2048 * 32 * 128 + HIDDEN * 128 + 2 * 128 + HIDDEN * 32
LAYER_NORMS = 2 * HIDDEN
DENSE_MLP = 3 * HIDDEN * 12288
SPARSE_MLP = HIDDEN * EXPERTS + EXPERTS + (EXPERTS + 1) * 3 * HIDDEN * 2048
MTP = ATTENTION + INDEXER + LAYER_NORMS + SPARSE_MLP + 2 * HIDDEN * HIDDEN + 3 * HIDDEN


def elements(indexers):
    layers = LAYERS * (ATTENTION + LAYER_NORMS) + indexers * INDEXER + DENSE * DENSE_MLP + (LAYERS - DENSE) * SPARSE_MLP
    return 2 * VOCABULARY + HIDDEN + layers


def tensors(indexers):
    sparse = 2 + 3 * (EXPERTS + 1)
    return 3 + LAYERS * (7 + 2) + indexers * 5 + DENSE * 3 + (LAYERS - DENSE) * sparse


def build(tmp_path, name, **changes):
    fields = json.loads((VENDORED / name).read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | changes))
    with torch.device("meta"):
        return GlmMoeDsaForCausalLM(read_config(tmp_path))


@pytest.mark.parametrize(("name", "indexers"), [("glm_5_config.json", 78), ("glm_5_2_config.json", 21)])
def test_tensors(tmp_path, name, indexers):
    model = build(tmp_path, name)
    state = parts(model)
    assert sum(t.numel() for t in state.values()) == elements(indexers)
    assert len(state) == tensors(indexers)
    assert sum(name.endswith("indexer.wk.weight") for name in state) == indexers
    assert model.model.layers[77].self_attn.softmax_scale == 256**-0.5


def test_published_totals():
    """GLM-5.2's, counted over the headers of all files; the multi-token-prediction layer has its own indexer. Without
    that layer GLM-5 rounds to the 744B of its report."""
    assert (elements(21), MTP) == (743_377_019_904, 9_952_920_576)
    assert tensors(21) + 7 + 5 + 2 + 2 + 3 * (EXPERTS + 1) + 4 == 59_585
    assert round(elements(78) / 1e9) == 744


def test_manifest(tmp_path):
    """By those totals; what is not BF16 are the gates' biases, of the sparse layers and the MTP layer's."""
    model = build(tmp_path, "glm_5_2_config.json")
    manifest = glm_moe_dsa_tensor_manifest(model.config)
    sizes = {name: math.prod(shape) for name, (shape, _) in manifest.items()}
    mtp = sum(size for name, size in sizes.items() if name.startswith("model.layers.78."))
    assert (len(sizes), sum(sizes.values()), mtp) == (59_585, 753_329_940_480, 9_952_920_576)
    assert {dtype for _, dtype in manifest.values()} == {"BF16", "F32"}
    assert sum(size for name, size in sizes.items() if manifest[name][1] == "F32") == 19_456 == 76 * EXPERTS
    ours = {name: tuple(t.shape) for name, t in parts(model).items()}
    assert ours == {name: shape for name, (shape, _) in manifest.items() if not model.skips(name)}


def test_fp8(tmp_path):
    """GLM-5-FP8: as DeepSeek-V3.2's, all matrices but the heads, the gates and the indexers' weights_proj."""
    quantization = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.layers.0.self_attn.indexers_proj"],
    }  # fmt: skip
    state = parts(build(tmp_path, "glm_5_2_config.json", quantization_config=quantization))
    fp8 = {name for name, t in state.items() if t.dtype == torch.float8_e4m3fn}
    matrices = {name for name, t in state.items() if t.dim() == 2 and not name.endswith("_scale_inv")}
    kept = ("lm_head.weight", "embed_tokens.weight", "mlp.gate.weight", "weights_proj.weight")
    assert fp8 == {name for name in matrices if not name.endswith(kept)}
    assert len(fp8) == LAYERS * 5 + 21 * 2 + DENSE * 3 + (LAYERS - DENSE) * 3 * (EXPERTS + 1)
    for name in fp8:
        rows, columns = state[name].shape
        assert state[f"{name}_scale_inv"].shape == (-(-rows // 128), -(-columns // 128))
