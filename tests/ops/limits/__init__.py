"""Calls that an op refuses. Either the op's kernels do not accept the arguments, though the reference does, or the
arguments are invalid.

Each family has a module with a list LIMITS of (name of a valid call, function of the call's arguments that returns the
changed ones, error message as a regular expression).
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

Limit = tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]

_modules = [importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)]
LIMITS: list[Limit] = [limit for module in _modules for limit in getattr(module, "LIMITS", ())]
