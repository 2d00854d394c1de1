"""The model that the published configuration describes has the published checkpoint's tensors."""

import math
import shutil

import torch

from dsa_layers.families.config import read_config
from dsa_layers.families.deepseek_v32.manifest import deepseek_v32_tensor_manifest
from dsa_layers.families.deepseek_v32.model import DeepseekV32ForCausalLM
from dsa_layers.families.published import VENDORED
from tests.layers.families.listings import parts

DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "BF16": torch.bfloat16, "F32": torch.float32}


def test_names_shapes_and_dtypes(tmp_path):
    shutil.copy(VENDORED / "deepseek_v32_config.json", tmp_path / "config.json")
    config = read_config(tmp_path)
    with torch.device("meta"):
        model = DeepseekV32ForCausalLM(config)
    ours = {name: (tuple(t.shape), t.dtype) for name, t in parts(model).items()}
    published = deepseek_v32_tensor_manifest(config)
    assert ours == {n: (shape, DTYPES[dtype]) for n, (shape, dtype) in published.items() if not model.skips(n)}
    assert sum(math.prod(shape) for name, (shape, _) in ours.items() if "_scale_inv" not in name) == 671_877_944_064
    # 192^-0.5 (0.1 ln 40 + 1)^2, by hand.
    assert abs(model.model.layers[60].self_attn.softmax_scale - 0.0721688 * 1.873853) < 1e-5
