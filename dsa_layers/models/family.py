"""Model families and their configurations, read from a checkpoint's config.json.

`read_config` accepts two spellings of the fields: the published one (`rope_theta`, `rope_scaling`, `torch_dtype`) and
the one of transformers 5 (`rope_parameters`, `dtype`, `mlp_layer_types`). It raises an error for an unsupported field
that changes results, for an unknown field whose name begins with, for example, "rope_" or "index", and for any unknown
field in the rope and quantisation objects: a model that ignored such a field could run with wrong results. It ignores
all other unknown fields and lists them in one warning. Fields that are null or known to have no influence are ignored
without a warning.
"""

import importlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from dsa_layers.config.fields import MAX_CONFIG_BYTES, Fields, one_of, token_ids
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.errors import ConfigError
from dsa_layers.models.precision import Precision
from dsa_layers.models.protocols import CheckpointModel, Drafter
from dsa_layers.models.registry import FAMILIES, TEXT_OF
from dsa_layers.untrusted_files import read_json_object

VENDORED = Path(__file__).parents[1] / "vendored"


def published_config(file: str) -> dict[str, Any]:
    """Return the fields of the configuration `file` in `dsa_layers/vendored`. The README there names the source."""
    return json.loads((VENDORED / file).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class PublishedFormat:
    """The differences between a family's published checkpoints and the model.

    norm_dtype     safetensors dtype of the norm weights; the model stores these weights in fp32
    e8m0_scales    whether the checkpoint stores power-of-two FP8 scales as F8_E8M0 instead of F32
    mtp_embedding  name of the copy of the embedding in each multi-token-prediction layer; None if no layer has a copy
    mtp_head       name of the copy of the head in each multi-token-prediction layer; None if no layer has a copy
    """

    norm_dtype: str = "F32"
    e8m0_scales: bool = False
    mtp_embedding: str | None = None
    mtp_head: str | None = None


@dataclass(frozen=True)
class TinyFields:
    """The configuration of a family's tiny checkpoint: the file `published` in `dsa_layers/vendored`, with the fields
    `changes` changed or added."""

    published: str
    changes: dict[str, Any]

    def fields(self, *, quantized: bool) -> dict[str, Any]:
        fields = published_config(self.published) | self.changes
        del fields["transformers_version"]  # transformers did not write the tiny config.json
        of_quantization = [name for name in ("expert_dtype", "quantization_config") if name in fields]
        quantization = {name: fields.pop(name) for name in of_quantization}
        return fields | quantization if quantized else fields


@dataclass(frozen=True)
class Family:
    """The classes and formats of a model family.

    config   the dataclass of the configuration
    model    callable (configuration, precision or None) -> the model, with newly initialised parameters
    format   the format of published checkpoints
    tiny     the configuration of the family's tiny checkpoint
    drafter  callable (model) -> its `Drafter`, a torch.nn.Module; None if drafters of this family are not supported
    """

    config: type[ModelConfig]
    model: Callable[[Any, Precision | None], CheckpointModel]
    format: PublishedFormat
    tiny: TinyFields
    drafter: Callable[[Any], Drafter] | None = None


def family(model_type: str) -> Family:
    """Return the family of a model type. Raise ValueError if the model type is unknown."""
    if model_type not in FAMILIES:
        raise ValueError(f"model_type: must be one of {', '.join(map(repr, FAMILIES))}, got {model_type!r}")
    return importlib.import_module(FAMILIES[model_type]).FAMILY


def read_config(directory: str | PathLike[str]) -> ModelConfig:
    """Read `directory`/config.json and return the configuration, an instance of the class for its `model_type`.

    If `directory`/generation_config.json has end-of-sequence ids, they replace the ids of config.json.
    `directory` may also be the path of a configuration file with any name.
    Issue one warning that lists the unknown fields, which are ignored. Raise ConfigError (a ValueError) if the file is
    missing or not a JSON object, if the model type or a value is not supported, if a field is missing or has the wrong
    type, or if fields contradict each other. The message names the file, and the wrong field's value and accepted
    values.
    """
    directory = Path(directory)
    path = directory if directory.is_file() else directory / "config.json"
    config = config_of(Fields(read_fields(path), path))
    if directory.is_file():
        return config
    generation = directory / "generation_config.json"
    if not generation.exists():
        return config
    eos = Fields.of_file(generation).read("eos_token_id", token_ids(config.vocab_size))
    return replace(config, eos_token_ids=eos or config.eos_token_ids)


def read_fields(path: Path) -> dict[str, Any]:
    """Return the fields of a config.json that describe the text model.

    If model_type is in TEXT_OF, the file may describe a model for text and images or audio. The fields of the text
    model are then either at the top level or in the object text_config. In the latter case, the fields _OF_TEXT that
    text_config lacks are read from the top level. The returned model_type is the text model's family. Issue a warning
    that names the parts that are left out. Return the fields of other files unchanged. Raise ConfigError if the file is
    missing or not a JSON object.
    """
    fields = read_json_object(path, ConfigError, MAX_CONFIG_BYTES)
    family_name = TEXT_OF.get(str(fields.get("model_type")))
    if family_name is None:
        return fields
    left_out = [name for name in ("vision_config", "audio_config") if name in fields]
    if left_out:
        named = ", ".join(name.removesuffix("_config") for name in left_out)
        warnings.warn(f"{path}: only the text model is used; left out: {named}", stacklevel=2)
    text = fields.get("text_config")
    if isinstance(text, dict):
        found = {name: value for name, value in fields.items() if name in _OF_TEXT}
        found |= {name: value for name, value in text.items() if value is not None}
    else:
        found = {name: value for name, value in fields.items() if name not in left_out}
    return found | {"model_type": family_name}


_OF_TEXT = "bos_token_id", "dtype", "eos_token_id", "quantization_config", "torch_dtype", "transformers_version"


def config_of(fields: Fields) -> ModelConfig:
    """Return the configuration in the fields of a config.json. Raise ConfigError and warn like `read_config`."""
    config = family(fields.read("model_type", one_of(*FAMILIES))).config.read(fields)
    fields.warn_unread()
    return config
