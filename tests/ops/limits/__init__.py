"""Calls that an op refuses: calls that the reference accepts but the op's kernels do not, and calls whose arguments are
invalid or do not fit each other.

Each family has a module with a list LIMITS. An entry is (name of a valid call, function of the call's arguments that
returns the changed ones, regular expression of the error message).
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

Limit = tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]

_modules = [importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)]
LIMITS: list[Limit] = [limit for module in _modules for limit in getattr(module, "LIMITS", ())]
