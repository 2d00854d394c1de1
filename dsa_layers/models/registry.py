"""The model families by their `model_type`."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsa_layers.models.family import Family

# model_type of config.json -> the module that has the family's record as FAMILY. Modules are imported on first use, so
# that a command's help can list the families at once. A family outside of this package is added here at run time.
FAMILIES = {
    "deepseek_v32": "dsa_layers.models.deepseek_v32",
    "deepseek_v4": "dsa_layers.models.deepseek_v4",
    "glm_moe_dsa": "dsa_layers.models.glm_moe_dsa",
}


def family(model_type: str) -> "Family":
    """The family of a model type. Raises ValueError for an unknown one."""
    if model_type not in FAMILIES:
        raise ValueError(f"model_type: must be one of {', '.join(map(repr, FAMILIES))}, got {model_type!r}")
    return importlib.import_module(FAMILIES[model_type]).FAMILY
