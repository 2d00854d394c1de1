"""Model configurations, read from a checkpoint's config.json.

`read_config` accepts two spellings: the published one (`rope_theta`, `rope_scaling`, `torch_dtype`) and the one of
transformers 5 (`rope_parameters`, `dtype`, `mlp_layer_types`). It raises an error for an unsupported field that changes
results, because a model that ignored the field would run and answer wrongly. It also raises an error for any unknown
field in the rope and quantisation objects, because every field there changes results. Tools add other fields to
config.json. `read_config` silently ignores fields that are known to have no influence, and fields that are null. It
ignores all other fields with one warning.
"""

from dataclasses import replace
from os import PathLike
from pathlib import Path

from dsa_layers.config.fields import Fields, one_of, token_ids
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.models.registry import FAMILIES, family


def read_config(directory: str | PathLike[str]) -> ModelConfig:
    """Read `directory`/config.json and return the configuration, an instance of the class for its `model_type`.

    If `directory`/generation_config.json has end-of-sequence ids, they replace the ids of config.json.
    `directory` may also be the path of a configuration file with any name.
    Issue one warning, on one line, that lists the unknown fields; `read_config` ignores these fields.
    Raise ConfigError (a ValueError) if the file is missing or not a JSON object, if the model type or a value is not
    supported, if a field is missing or has the wrong type, or if fields contradict each other. The message names the
    file, the field, its value and the accepted values.
    """
    directory = Path(directory)
    if directory.is_file():
        return config_of(Fields.of_file(directory))
    config = config_of(Fields.of_file(directory / "config.json"))
    generation = directory / "generation_config.json"
    if not generation.exists():
        return config
    eos = Fields.of_file(generation).read("eos_token_id", token_ids(config.vocab_size))
    return replace(config, eos_token_ids=eos or config.eos_token_ids)


def config_of(fields: Fields) -> ModelConfig:
    """Return the configuration in the fields of a config.json. Raise ConfigError and warn like `read_config`."""
    config = family(fields.read("model_type", one_of(*FAMILIES))).config.read(fields)
    fields.warn_unread()
    return config
