"""Which model families there are. A family is a folder of this package, called by the `model_type` of its config.json:
nothing else lists them."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from dsa_layers import families

if TYPE_CHECKING:
    from dsa_layers.families.family import Family


def model_types() -> tuple[str, ...]:
    """The model types there are, in alphabetical order: folders with a module `family`. Imports none of them, so that a
    command's help can list them at once."""
    return tuple(sorted(path.parent.name for folder in families.__path__ for path in Path(folder).glob("*/family.py")))


def family(model_type: str) -> "Family":
    """The family of a model type. Raises ValueError for one that there is not."""
    if model_type not in model_types():
        raise ValueError(f"model_type: must be one of {', '.join(map(repr, model_types()))}, got {model_type!r}")
    return importlib.import_module(f"dsa_layers.families.{model_type}.family").FAMILY
