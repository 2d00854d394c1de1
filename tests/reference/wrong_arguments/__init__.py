"""Wrong arguments of every op and the error messages that they must give, in a module per family of ops.

Each entry of WRONG is (name of a case of `dsa.cases`, changes of the case's arguments, a part of the expected message).
The changes are a dict of arguments, or a function from the case's arguments to such a dict. In a family's module, WRONG
is a dict from a case's name to its (changes, message) pairs.
"""

import importlib
import pkgutil

_modules = [importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)]
WRONG = [(name, *row) for module in _modules for name, rows in module.WRONG.items() for row in rows]
