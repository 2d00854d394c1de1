"""Arguments that specs allow and kernels do not take, and relations between an op's arguments, a module a family:
(valid call, changes from its arguments, message) each."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

Limit = tuple[str, Callable[[dict[str, Any]], dict[str, Any]], str]

_modules = [importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)]
LIMITS: list[Limit] = [limit for module in _modules for limit in getattr(module, "LIMITS", ())]
