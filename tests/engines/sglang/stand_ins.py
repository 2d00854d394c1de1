"""Stand-ins for packages that are not installed, so that an engine's .py files can be imported without them.

An attribute of a stand-in module is a class if its name looks like a class name, and a mock otherwise. Some packages
check which other packages are installed. Import them before `stand_in` is called, so that they do not find the
stand-ins.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from unittest.mock import MagicMock


class AnyType(type):
    """The metaclass of stand-in classes. They can be subclassed, called, subscripted, and used as decorators and in
    annotations."""

    def __new__(metaclass, name, bases, space, **options):
        return super().__new__(metaclass, name, bases, space)

    def __init__(cls, name, bases, space, **options):
        super().__init__(name, bases, space)

    def __call__(cls, *args, **kwargs):
        try:
            return super().__call__(*args, **kwargs)
        except TypeError:
            return super().__call__()

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)

    def __getitem__(cls, item):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__

    def __get_pydantic_core_schema__(cls, source, handler):
        from pydantic_core import core_schema

        return core_schema.any_schema()


class StandIn(types.ModuleType):
    __path__ = ()
    __version__ = "0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        is_class = name.lstrip("_")[:1].isupper() and not name.isupper()
        value = AnyType(name, (), {}) if is_class else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports stand-ins for packages that no other finder finds, and for their modules. Packages in `real` get none."""

    def __init__(self, real):
        self.real = real

    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in self.real or (package != name and not isinstance(sys.modules.get(package), StandIn)):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


def stand_in(*real):
    sys.meta_path.append(Finder(real))
