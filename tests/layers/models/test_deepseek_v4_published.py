"""The published configurations of DeepSeek-V4, and what the checkpoints that they describe take."""

import math
from dataclasses import replace

import torch

from dsa_layers.config.model_config import QuantizationConfig, RopeConfig, YarnConfig
from dsa_layers.io.manifest import published_manifest
from dsa_layers.models.deepseek_v4 import DeepseekV4ForCausalLM
from dsa_layers.models.precision import Precision
from tests.layers.models.configs import read
from tests.layers.models.listings import parts


def test_configurations(tmp_path):
    flash, pro = (read(tmp_path, f"deepseek_v4_{release}") for release in ("flash", "pro"))
    kinds = ["compressed_sparse_attention", "heavily_compressed_attention"]
    assert flash.layer_types == ("sliding_attention",) * 2 + tuple(kinds * 20) + (kinds[0],)
    assert pro.layer_types == (kinds[1],) * 2 + tuple(kinds * 29) + (kinds[0],)
    assert flash.rope == RopeConfig(1e4, None)
    assert flash.compress_rope == RopeConfig(1.6e5, YarnConfig(16.0, 65536, 32.0, 1.0, 0.0, 0.0))
    assert flash.quantization == QuantizationConfig("ue8m0", "fp4")
    assert flash.hash_layers == (True,) * 3 + (False,) * 40


def test_fp4_experts_take_what_their_files_take(tmp_path):
    """Within 2%, so that V4-Flash fits two H200s with room for its cache."""
    config = read(tmp_path, "deepseek_v4_flash")
    sizes = {"I8": 1, "F8_E8M0": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I64": 8}
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config, replace(Precision.of(config), fp4_experts=True))
    stored = {n: e for n, e in published_manifest(config).items() if not model.skips(n)}
    tensors = parts(model)
    for word in (".experts.", ""):
        in_files = sum(math.prod(shape) * sizes[dtype] for n, (shape, dtype) in stored.items() if word in n)
        held = sum(tensor.nbytes for name, tensor in tensors.items() if word in name)
        assert abs(held / in_files - 1) < 0.02
    assert 140e9 < held < 170e9
