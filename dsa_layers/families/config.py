"""Model configurations, read from a checkpoint's config.json.

`read_config` accepts the spellings in use: the published one (`rope_theta`, `rope_scaling`, `torch_dtype`) and the one
that transformers 5 writes (`rope_parameters`, `dtype`, `mlp_layer_types`). It is strict: a field that is neither read
here nor known to have no influence on inference stops the load by its name, because a model that ignores one line of
its configuration still runs, and answers wrongly.
"""

from os import PathLike
from pathlib import Path

from dsa_layers.families.fields import Fields, read_object
from dsa_layers.families.model import ModelConfig
from dsa_layers.families.registry import family, model_types
from dsa_layers.untrusted_files import is_there


def read_config(directory: str | PathLike[str]) -> ModelConfig:
    """The configuration in `directory`/config.json, of the class of its `model_type`.

    If `directory`/generation_config.json names end-of-sequence ids, they replace config.json's.
    `directory` may also be the path of a config.json by itself, whatever the file is called.
    Raises ConfigError (a ValueError) that names the file and the field, what it holds and what is accepted: for a file
    that is missing or not a JSON object, a model type or a value that is not supported, a field that is missing, of
    the wrong type or unknown, and fields that contradict each other.
    """
    directory = Path(directory)
    alone = directory.is_file()
    fields = read_object(directory if alone else directory / "config.json")
    generation_path = directory / "generation_config.json"
    return config_of(fields, read_object(generation_path) if not alone and is_there(generation_path) else None)


def config_of(fields: Fields, generation: Fields | None = None) -> ModelConfig:
    """The configuration in the fields of a config.json, and of a generation_config.json if there is one. Raises
    ConfigError as `read_config` does."""
    return family(fields.one_of("model_type", model_types())).read_config(fields, generation)
