"""Published configurations with some fields changed."""

import json
from pathlib import Path
from typing import Any

import pytest

from dsa_layers.config.model_config import ModelConfig
from dsa_layers.errors import ConfigError
from dsa_layers.models.family import published_config, read_config

ABSENT = object()


def write(directory: Path, name: str, **changes: Any) -> None:
    """Writes the configuration; a dotted name is a field of a nested object."""
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


def check_refused(directory: Path, name: str, changes: dict[str, Any], parts: list[str]) -> None:
    """With an error about the file that has all of these parts."""
    with pytest.raises(ConfigError) as error:
        read(directory, name, **changes)
    assert str(error.value).startswith(f"{directory / 'config.json'}: ")
    for part in parts:
        assert part in str(error.value)
