"""Wrong arguments of every op, a module per family: for the name of a case, changes of its arguments and the message.

The changes are a dict of arguments, or a function of the case's arguments that returns one.
"""

import importlib
import pkgutil

_modules = [importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)]
WRONG = [(name, *row) for module in _modules for name, rows in module.WRONG.items() for row in rows]
