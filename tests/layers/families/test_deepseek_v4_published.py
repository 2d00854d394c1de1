"""The published configurations of DeepSeek-V4, and the tensors of the checkpoints that they describe."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from dsa_layers.families.config import read_config
from dsa_layers.families.deepseek_v4.manifest import deepseek_v4_tensor_manifest
from dsa_layers.families.deepseek_v4.model import DeepseekV4ForCausalLM
from dsa_layers.families.parts import QuantizationConfig, RopeConfig, YarnConfig
from dsa_layers.families.precision import Precision
from dsa_layers.families.published import VENDORED
from tests.layers.families.listings import parts, read_listing

# How the model holds what is stored, with FP4 widened to FP8: scales and norms in fp32.
DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32}
DTYPES |= {"F8_E8M0": torch.float32, "I64": torch.int64}


def published(release, directory):
    shutil.copy(VENDORED / f"deepseek_v4_{release}_config.json", directory / "config.json")
    return read_config(directory)


def held(model, stored):
    """The model's tensors that the published ones make: name -> (shape, dtype)."""
    tensors = {}
    for name, (shape, dtype) in stored.items():
        if model.skips(name):
            continue
        ours = model.name_of(name)
        assert ours not in tensors, name
        kept = torch.float32 if name.endswith("norm.weight") else DTYPES[dtype]
        weight_shape, weight_dtype = stored.get(name.removesuffix("scale") + "weight", (None, None))
        if dtype == "I8":
            shape = (shape[0], 2 * shape[1])
        elif weight_dtype == "I8":
            shape = (-(-weight_shape[0] // 128), -(-2 * weight_shape[1] // 128))
        tensors[ours] = (shape, kept)
    return tensors


def test_configurations(tmp_path):
    flash = published("flash", tmp_path)
    assert (flash.hidden_size, flash.num_attention_heads, flash.o_groups, flash.index_topk) == (4096, 64, 8, 512)
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    assert flash.layer_types == ("sliding_attention",) * 2 + tuple(kinds * 20) + (kinds[0],)
    assert flash.rope == RopeConfig(1e4, None)
    assert flash.compress_rope == RopeConfig(1.6e5, YarnConfig(16.0, 65536, 32.0, 1.0, 0.0, 0.0))
    assert flash.quantization == QuantizationConfig((128, 128), "ue8m0", "fp4")
    assert flash.hash_layers == (True,) * 3 + (False,) * 40
    assert (flash.swiglu_limit, flash.routed_scaling_factor, flash.hc_mult) == (10.0, 1.5, 4)
    pro = published("pro", tmp_path)
    assert (pro.hidden_size, pro.num_attention_heads, pro.o_groups, pro.index_topk) == (7168, 128, 16, 1024)
    assert pro.layer_types == (kinds[1],) * 2 + tuple(kinds * 29) + (kinds[0],)
    assert (pro.n_routed_experts, pro.moe_intermediate_size, pro.routed_scaling_factor) == (384, 3072, 2.5)
    assert (pro.eos_token_ids, pro.num_nextn_predict_layers, pro.dtype) == ((1,), 1, "bfloat16")


@pytest.mark.parametrize("release", ["flash", "pro"])
def test_transformers_spelling_reads_the_same(tmp_path, release):
    from transformers import DeepseekV4Config

    expected = published(release, tmp_path)
    DeepseekV4Config.from_pretrained(tmp_path).save_pretrained(tmp_path / "rewritten")
    fields = json.loads((tmp_path / "rewritten" / "config.json").read_text())
    assert "layer_types" in fields and fields["quantization_config"]["expert_dtype"] == "fp4"
    assert read_config(tmp_path / "rewritten") == expected


def test_manifest_is_the_published_listing(tmp_path):
    assert deepseek_v4_tensor_manifest(published("pro", tmp_path)) == read_listing("deepseek_v4_pro_tensors.json")


def test_manifest_of_other_quantisations(tmp_path):
    """FP8 experts with any scales, as in the Base releases; no quantisation; and an early configuration."""
    published("flash", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())

    def manifest(**changes):
        (tmp_path / "config.json").write_text(json.dumps(fields | changes))
        return deepseek_v4_tensor_manifest(read_config(tmp_path))

    scheme = fields["quantization_config"] | {"scale_fmt": None}
    base = manifest(expert_dtype="fp8", quantization_config=scheme)
    assert base["layers.5.ffn.experts.9.w2.weight"] == ((4096, 2048), "F8_E4M3")
    assert base["layers.5.ffn.experts.9.w2.scale"] == ((32, 16), "F32")
    assert base["layers.2.attn.indexer.wq_b.scale"] == ((64, 8), "F32")
    plain = manifest(quantization_config=None)
    assert {dtype for _, dtype in plain.values()} == {"BF16", "F32", "I64"}
    assert not [name for name in plain if name.endswith(".scale")]
    assert manifest(expert_dtype=None) == manifest()


@pytest.mark.parametrize(
    ("release", "published_as"), [("flash", 284e9), pytest.param("pro", 1.6e12, marks=pytest.mark.slow)]
)
def test_names_shapes_and_dtypes(tmp_path, release, published_as):
    config = published(release, tmp_path)
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config)
    ours = {name: (tuple(t.shape), t.dtype) for name, t in parts(model).items()}
    assert ours == held(model, deepseek_v4_tensor_manifest(config))
    parameters = sum(math.prod(s) for n, (s, _) in ours.items() if not n.endswith(("weight_scale_inv", "tid2eid")))
    assert parameters == pytest.approx(published_as, rel=0.02)


def test_fp4_experts_take_what_their_files_take(tmp_path):
    """Within 2%, so that V4-Flash fits two H200s with room for its cache."""
    config = published("flash", tmp_path)
    sizes = {"I8": 1, "F8_E8M0": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I64": 8}
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config, replace(Precision.of(config), fp4_experts=True))
    stored = {n: e for n, e in deepseek_v4_tensor_manifest(config).items() if not model.skips(n)}
    tensors = parts(model)
    for word in (".experts.", ""):
        in_files = sum(math.prod(shape) * sizes[dtype] for n, (shape, dtype) in stored.items() if word in n)
        held = sum(tensor.nbytes for name, tensor in tensors.items() if word in name)
        assert abs(held / in_files - 1) < 0.02
    assert 140e9 < held < 170e9
