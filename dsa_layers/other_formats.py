"""Formats of other tools, recognised by their files or by config.json, so that one line says what a checkpoint is."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsa_layers.arguments import shown_json
from dsa_layers.errors import ConfigError
from dsa_layers.untrusted_files import is_there, read_json_object

ACCEPTED = (
    "accepted: Hugging Face's safetensors, in bfloat16, float16 or float32, or in DeepSeek's FP8 (quant_method 'fp8', "
    "e4m3, weight_block_size [128, 128]), of DeepSeek-V4 also with experts in FP4"
)
_MAX_BYTES = 2**20

_METHODS = {
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "exl2": "ExLlamaV2",
    "exl3": "ExLlamaV3",
    "fbgemm_fp8": "FBGEMM's FP8 with a scale per row",
    "gptq": "GPTQ",
    "hqq": "HQQ",
    "modelopt": "NVIDIA ModelOpt",
    "modelopt_fp4": "NVIDIA ModelOpt",
    "mxfp4": "MXFP4 as gpt-oss has it",
    "quark": "AMD Quark",
    "torchao": "torchao",
}
# What a quantization_config says of the kind of weights, for the message.
_DETAILS = ("quant_algo", "format", "bits", "load_in_4bit", "load_in_8bit", "group_size")

# Files without which, or instead of which, a checkpoint of these tools does not exist.
_FILES = (
    ("*.gguf", "GGUF, which llama.cpp reads"),
    (
        "adapter_config.json",
        "an adapter (LoRA) and no model; merge it into its base model first (peft: merge_and_unload)",
    ),
    ("model*-mp*.safetensors", "shards of DeepSeek's own inference code, which its convert.py writes"),
    ("consolidated*.safetensors", "Mistral's consolidated files"),
    ("consolidated*.pth", "Meta's consolidated files"),
    ("pytorch_model*.bin", "PyTorch's pickled files; save the model as safetensors (safe_serialization=True)"),
    ("*.distcp", "a distributed checkpoint of torch; save it as safetensors"),
)


def check_quantization(path: Path, fields: Mapping[str, Any]) -> None:
    """Raises ConfigError, of one line, for a config.json at `path`, of these fields, whose weights another tool has
    quantised, or where a file in its folder says so: ModelOpt's hf_quant_config.json."""
    quantization = fields.get("quantization_config")
    mlx = fields.get("quantization")
    if isinstance(mlx, dict) and "group_size" in mlx:
        raise _refused(f"{path}: field 'quantization' is MLX's{_details(mlx)}")
    if isinstance(quantization, dict):
        method = quantization.get("quant_method")
        if isinstance(method, str) and method in _METHODS:
            what = f"field 'quantization_config.quant_method' is {shown_json(method)}: {_METHODS[method]}"
            raise _refused(f"{path}: {what}{_details(quantization)}")
    sibling = path.parent / "hf_quant_config.json"
    if path.name == "config.json" and is_there(sibling):
        told = read_json_object(sibling, ConfigError, _MAX_BYTES).get("quantization")
        algorithm = told.get("quant_algo") if isinstance(told, dict) else None
        if algorithm is not None:  # null where the cache alone is quantised
            raise _refused(f"{sibling}: field 'quantization.quant_algo' is {shown_json(algorithm)}: NVIDIA ModelOpt")


def found_instead(directory: Path) -> str:
    """What a directory holds in place of a Hugging Face checkpoint, as a message ends; empty where nothing is known."""
    for pattern, what in _FILES:
        files = sorted(path.name for path in directory.glob(pattern))
        if files:
            return f"; {shown_json(files[0])[1:-1]} is {what}; {ACCEPTED}"
    return ""


def _details(quantization: Mapping[str, Any]) -> str:
    found = [f"{name} {shown_json(quantization[name])}" for name in _DETAILS if quantization.get(name)]
    return f" ({', '.join(found)})" if found else ""


def _refused(what: str) -> ConfigError:
    return ConfigError(f"{what}; {ACCEPTED}")
