"""Model configurations, read from a checkpoint's config.json.

`read_config` accepts the spellings in use: the published one (`rope_theta`, `rope_scaling`, `torch_dtype`) and the one
that transformers 5 writes (`rope_parameters`, `dtype`, `mlp_layer_types`). It is strict: a field that is neither read
here nor known to have no influence on inference stops the load by its name, because a model that ignores one line of
its configuration still runs, and answers wrongly.
"""

import os
from os import PathLike
from pathlib import Path

from dsa_layers.families.fields import read_object
from dsa_layers.families.model import ModelConfig
from dsa_layers.families.registry import family, model_types


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
    model_type = fields.one_of("model_type", model_types())
    generation_path = directory / "generation_config.json"
    # A link to nothing is a file that was not fetched, and no absent one.
    generation = read_object(generation_path) if not alone and os.path.lexists(generation_path) else None
    return family(model_type).read_config(fields, generation)
