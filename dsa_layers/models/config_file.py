"""Model configurations, read from a checkpoint's config.json.

`read_config` accepts the spellings in use: the published one (`rope_theta`, `rope_scaling`, `torch_dtype`) and the one
that transformers 5 writes (`rope_parameters`, `dtype`, `mlp_layer_types`). A field that is known to change results and
is not supported stops the load by its name: a model that ignores one still runs, and answers wrongly. So does any
unknown field of the rope and quantisation objects, where each one counts. Tools add fields of their own to config.json:
those that are known to have no influence, and null, are ignored silently, all others with one warning.
"""

from dataclasses import replace
from os import PathLike
from pathlib import Path

from dsa_layers.config.fields import Fields, one_of, token_ids
from dsa_layers.config.model_config import ModelConfig
from dsa_layers.models.registry import FAMILIES, family
from dsa_layers.untrusted_files import is_there


def read_config(directory: str | PathLike[str]) -> ModelConfig:
    """The configuration in `directory`/config.json, of the class of its `model_type`.

    If `directory`/generation_config.json names end-of-sequence ids, they replace config.json's.
    `directory` may also be the path of a config.json by itself, whatever the file is called.
    Warns, in one line, of fields that are not known and so ignored.
    Raises ConfigError (a ValueError) that names the file and the field, what it holds and what is accepted: for a file
    that is missing or not a JSON object, a model type or a value that is not supported, a field that is missing or of
    the wrong type, and fields that contradict each other.
    """
    directory = Path(directory)
    if directory.is_file():
        return config_of(Fields.of_file(directory))
    config = config_of(Fields.of_file(directory / "config.json"))
    generation = directory / "generation_config.json"
    if not is_there(generation):
        return config
    eos = Fields.of_file(generation).read("eos_token_id", token_ids(config.vocab_size))
    return replace(config, eos_token_ids=eos or config.eos_token_ids)


def config_of(fields: Fields) -> ModelConfig:
    """The configuration in the fields of a config.json. Raises ConfigError and warns as `read_config` does."""
    config = family(fields.read("model_type", one_of(*FAMILIES))).config.read(fields)
    fields.warn_unread()
    return config
