"""`Replacements` replaces attributes of an engine's modules and classes, all or none, and can restore them."""

import sys
import types

import pytest

from dsa_engines.replacements import NotFound, Replacements, check_parameters, find


class Base:
    def inherited(self):
        return "base"


class Owner(Base):
    def method(self, x, y=1):
        return x + y

    @classmethod
    def of_class(cls, n):
        return cls.__name__, n

    @staticmethod
    def static(n):
        return n


@pytest.fixture
def engine(monkeypatch):
    module = types.ModuleType("an_engine")
    module.function = lambda a, b: a - b
    module.absent_yet = None
    module.Owner = type("Owner", (Base,), dict(vars(Owner)))
    monkeypatch.setitem(sys.modules, "an_engine", module)
    return module


def test_replaced_and_put_back(engine):
    before, methods = dict(vars(engine)), dict(vars(engine.Owner))
    done = Replacements()
    done.put(
        {
            "an_engine:function": lambda a, b: a * b,
            "an_engine:absent_yet": len,
            "an_engine:Owner.method": lambda self, x, y=1: x * y,
            "an_engine:Owner.of_class": classmethod(lambda cls, n: n),
        }
    )
    assert engine.function(3, 4) == 12 and engine.absent_yet == len
    assert engine.Owner().method(3, 4) == 12 and engine.Owner.of_class(2) == 2
    done.undo()
    assert vars(engine) == before and dict(vars(engine.Owner)) == methods
    assert engine.Owner.of_class(2) == ("Owner", 2)
    done.undo()
    assert vars(engine) == before


def test_what_was_replaced_twice_is_what_it_was_first(engine):
    before, done = engine.function, Replacements()
    for value in (len, max):
        done.put({"an_engine:function": value})
    done.undo()
    assert engine.function is before


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("an_engine:nothing", "an_engine:nothing is not there"),
        ("an_engine:Owner.nothing", "an_engine:Owner.nothing is not there"),
        ("an_engine:Owner.inherited", "an_engine:Owner.inherited is not there"),
        ("an_engine:Nothing.method", "an_engine:Nothing.method is not there"),
        ("no_engine:function", r"no_engine cannot be imported \(ModuleNotFoundError: No module named 'no_engine'\)"),
    ],
)
def test_nothing_is_replaced_where_one_is_missing(engine, path, message):
    before, done = dict(vars(engine)), Replacements()
    with pytest.raises(NotFound, match=f"^{message}$"):
        done.put({"an_engine:function": len, path: len})
    assert vars(engine) == before


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("an_engine:function", ["a", "b"]),
        ("an_engine:Owner.method", ["self", "x", "y"]),
        ("an_engine:Owner.of_class", ["n"]),
        ("an_engine:Owner.static", ["n"]),
    ],
)
def test_other_parameters_are_refused(engine, path, parameters):
    check_parameters(path, parameters)
    taken = ", ".join(parameters)
    with pytest.raises(NotFound, match=rf"^{path} takes \({taken}\), and was tested with \({taken}, more\)$"):
        check_parameters(path, [*parameters, "more"])


def test_what_is_no_function_is_refused(engine):
    with pytest.raises(NotFound, match=r"^an_engine:absent_yet is no function"):
        check_parameters("an_engine:absent_yet", [])


def test_find(engine):
    assert find("an_engine:function") == (engine, "function", engine.function)
    assert isinstance(find("an_engine:Owner.of_class").value, classmethod)
