"""Configurations of published models, some with changed fields, and of tiny models."""

import json
from pathlib import Path
from typing import Any

from dsa_layers.config.fields import Fields
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.models.family import config_of, family, published_config, read_config

ABSENT = object()


def write(directory: Path, name: str, **changes: Any) -> None:
    """Write the published configuration `name`, with `changes`, to config.json in `directory`. A dotted name changes a
    field of a nested object. The value ABSENT deletes the field."""
    fields = published_config(f"{name}_config.json")
    for changed, value in changes.items():
        owner, _, field = changed.rpartition(".")
        owner = fields[owner] if owner else fields
        owner[field] = value
        if value is ABSENT:
            del owner[field]
    (directory / "config.json").write_text(json.dumps(fields))


def read(directory: Path, name: str, **changes: Any) -> ModelConfig:
    write(directory, name, **changes)
    return read_config(directory)


def published(name: str) -> ModelConfig:
    """Return the published configuration `name`. If it lacks quantization_config, add DeepSeek-V3.2's."""
    quantised = published_config("deepseek_v32_config.json")["quantization_config"]
    fields = {"quantization_config": quantised} | published_config(f"{name}_config.json")
    return config_of(Fields(fields, Path(f"{name}_config.json")))


def tiny(model_type: str) -> ModelConfig:
    return config_of(Fields(family(model_type).tiny.fields(quantized=True), Path(model_type)))
