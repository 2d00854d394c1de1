"""The registry of model families, by `model_type`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsa_layers.models.family import Family

# {model_type in config.json: the module that defines FAMILY}. `family` imports a module on first use, so that the help
# of a command can list the families without imports. At run time a caller may add a family of another package.
FAMILIES = {
    "deepseek_v32": "dsa_layers.models.deepseek_v32",
    "deepseek_v4": "dsa_layers.models.deepseek_v4",
    "glm_moe_dsa": "dsa_layers.models.glm_moe_dsa",
}


def family(model_type: str) -> "Family":
    """Return the family for a model type. Raise ValueError if the model type is unknown."""
    if model_type not in FAMILIES:
        raise ValueError(f"model_type: must be one of {', '.join(map(repr, FAMILIES))}, got {model_type!r}")
    return importlib.import_module(FAMILIES[model_type]).FAMILY
