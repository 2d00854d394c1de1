"""Small valid calls of every public op, with all of their arguments, that run on a CPU in about a millisecond and on a
GPU through the kernels; and what each op promises to return.

A module a family, as in dsa.ops. `CALLS` is for tests of whichever op: of defaults that torch can change, and of wrong
arguments.
"""

import importlib
import pkgutil

from dsa.cases import CASES
from dsa.cases.case import Case
from tests.valid_calls.description import ValidCall

__all__ = ["CALLS", "ValidCall"]


_modules = [importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)]
CALLS: list[ValidCall | Case] = [*(call for module in _modules for call in getattr(module, "CALLS", ())), *CASES]
