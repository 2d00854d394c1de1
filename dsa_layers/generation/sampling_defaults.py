"""How a checkpoint's authors sample from it: generation_config.json."""

import os
from os import PathLike
from typing import Any

from dsa_layers.arguments import shown_json
from dsa_layers.errors import ConfigError
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.hub import checkpoint_directory
from dsa_layers.untrusted_files import read_json_object

_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_MAX_BYTES = 2**20


def sampling_defaults(directory: str | PathLike[str]) -> dict[str, Any]:
    """The SamplingParams that generation_config.json sets, of a checkpoint's directory or hub id: some of temperature,
    top_k, top_p, min_p and repetition_penalty.

    "do_sample": false is temperature 0, and true without a temperature is 1, as transformers takes them. Empty, which
    means greedy, for a file that is absent or says nothing of sampling.
    Raises ConfigError (a ValueError) that names the file, the field, its value and what is accepted.
    """
    path = checkpoint_directory(directory, weights=False) / "generation_config.json"
    if not os.path.lexists(path):
        return {}
    fields = read_json_object(path, ConfigError, _MAX_BYTES)
    do_sample = fields.get("do_sample")
    if do_sample is not None and not isinstance(do_sample, bool):
        raise ConfigError(f"{path}: field 'do_sample' is {shown_json(do_sample)}; accepted: true, false or null")
    found = {name: fields[name] for name in _NAMES if fields.get(name) is not None}
    if do_sample is not None:
        found["temperature"] = found.get("temperature", 1.0) if do_sample else 0.0
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{path}: field {name}: must be a number, got {shown_json(value)}")
    try:
        SamplingParams(**found)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: field {error}") from None
    return found
