"""Wrong arguments of every op, a module per family. Each entry of WRONG is (a case's name, changes of its arguments,
the expected message).

The changes are a dict of arguments, or a function from the case's arguments to such a dict.
"""

import importlib
import pkgutil

_modules = [importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)]
WRONG = [(name, *row) for module in _modules for name, rows in module.WRONG.items() for row in rows]
