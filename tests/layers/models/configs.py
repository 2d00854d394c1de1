"""Published configurations with some fields changed."""

import json
from pathlib import Path
from typing import Any

from dsa_layers.config.model_config import ModelConfig
from dsa_layers.models.family import published_config, read_config

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
