"""Checkpoints of other tools: one line says what they are and what is accepted."""

import json

import pytest

from dsa_layers.errors import CheckpointError, ConfigError
from dsa_layers.io.directory import Checkpoint
from dsa_layers.io.loading import load_model
from dsa_layers.models.family import published_config

CONFIG = published_config("deepseek_v32_config.json")
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
FLOAT = {name: value for name, value in CONFIG.items() if name != "quantization_config"}
NVFP4 = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {}}


def quantised(**fields):
    return {"config.json": FLOAT | {"quantization_config": fields}}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"config.json": FLOAT, "hf_quant_config.json": MODELOPT},
            "hf_quant_config.json: field 'quantization.quant_algo' is 'NVFP4': NVIDIA ModelOpt",
        ),
        (quantised(quant_method="modelopt", quant_algo="NVFP4"), "NVIDIA ModelOpt (quant_algo 'NVFP4')"),
        (quantised(**NVFP4), "compressed-tensors (format 'nvfp4-pack-quantized')"),
        (quantised(quant_method="awq", bits=4, group_size=128, version="gemm"), "AWQ (bits 4, group_size 128)"),
        (quantised(quant_method="gptq", bits=4, desc_act=False), "GPTQ (bits 4)"),
        (quantised(quant_method="bitsandbytes", load_in_4bit=True), "bitsandbytes (load_in_4bit true)"),
        (quantised(quant_method="mxfp4"), "MXFP4"),
        ({"model-Q4_K_M.gguf": {}}, "model-Q4_K_M.gguf is GGUF"),
        ({"config.json": FLOAT, "pytorch_model-00001-of-00002.bin": {}}, "PyTorch's pickled files"),
        ({"params.json": {}, "consolidated-00001-of-00002.safetensors": {}}, "Mistral's consolidated files"),
        ({"adapter_config.json": {}, "adapter_model.safetensors": {}}, "an adapter (LoRA) and no model"),
        ({"config.json": FLOAT, "model0-mp8.safetensors": {}}, "DeepSeek's own inference code"),
    ],
)
def test_the_format_of_another_tool_is_named_in_one_line(tmp_path, files, said):
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    of_files = any(".bin" in name or "mp8" in name for name in files)
    with pytest.raises(CheckpointError if of_files else ConfigError) as error:
        Checkpoint(tmp_path) if of_files else load_model(tmp_path, device="cpu", progress=False)
    message = str(error.value)
    assert said in message and "accepted: Hugging Face's safetensors" in message and "\n" not in message
