"""The models that the published configurations describe have the published checkpoints' tensors."""

import math

import torch

from dsa_layers.io.manifest import published_manifest
from dsa_layers.models.glm_moe_dsa import GlmMoeDsaForCausalLM
from tests.layers.models.configs import read
from tests.layers.models.listings import parts


def build(tmp_path, **changes):
    with torch.device("meta"):
        return GlmMoeDsaForCausalLM(read(tmp_path, "glm_5_2", **changes))


def test_tensors(tmp_path):
    """By the totals over the headers of all files; what is not BF16 are the gates' biases, of the sparse layers and the
    MTP layer's."""
    model = build(tmp_path)
    manifest = published_manifest(model.config)
    sizes = {name: math.prod(shape) for name, (shape, _) in manifest.items()}
    mtp = sum(size for name, size in sizes.items() if name.startswith("model.layers.78."))
    assert (len(sizes), sum(sizes.values()), mtp) == (59_585, 753_329_940_480, 9_952_920_576)
    assert {dtype for _, dtype in manifest.values()} == {"BF16", "F32"}
    assert sum(size for name, size in sizes.items() if manifest[name][1] == "F32") == 19_456 == 76 * 256
    ours = parts(model).keys()
    assert ours == {name for name in manifest if not model.skips(name)}
    assert sum(name.endswith("indexer.wk.weight") for name in ours) == 21


def test_fp8(tmp_path):
    """GLM-5-FP8: as DeepSeek-V3.2's, all matrices but the heads, the gates and the indexers' weights_proj."""
    quantization = {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens", "model.layers.0.self_attn.indexers_proj"],
    }  # fmt: skip
    state = parts(build(tmp_path, quantization_config=quantization))
    fp8 = {name for name, t in state.items() if t.dtype == torch.float8_e4m3fn}
    matrices = {name for name, t in state.items() if t.dim() == 2 and not name.endswith("_scale_inv")}
    kept = ("lm_head.weight", "embed_tokens.weight", "mlp.gate.weight", "weights_proj.weight")
    assert fp8 == {name for name in matrices if not name.endswith(kept)}
    assert len(fp8) == 78 * 5 + 21 * 2 + 3 * 3 + 75 * 3 * 257
    for name in fp8:
        rows, columns = state[name].shape
        assert state[f"{name}_scale_inv"].shape == (-(-rows // 128), -(-columns // 128))
