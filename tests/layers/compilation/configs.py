"""Configurations of published and tiny models."""

import json
import tempfile
from pathlib import Path

from dsa_layers.config.model_config import ModelConfig
from dsa_layers.models.family import family, published_config, read_config


def config_of(fields: dict) -> ModelConfig:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(fields))
        return read_config(Path(directory))


def published(name: str) -> ModelConfig:
    """Read dsa_layers/vendored/{name}_config.json. If it lacks quantization_config, add DeepSeek-V3.2's."""
    quantised = published_config("deepseek_v32_config.json")["quantization_config"]
    return config_of({"quantization_config": quantised} | published_config(f"{name}_config.json"))


def tiny(model_type: str, **changes) -> ModelConfig:
    return config_of(family(model_type).tiny.fields(quantized=True) | changes)
