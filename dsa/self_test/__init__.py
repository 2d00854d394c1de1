"""A quick test of every public op on one device, against short float64 formulas. `dsa check` runs them.

A module a family, as in dsa.ops. The test of the op `dsa/ops/FAMILY/OP.py` is the function OP of its family's module:
it takes the device, and raises AssertionError where the op is wrong.
"""

import importlib
import pkgutil
from collections.abc import Callable

import torch

from dsa.cases import cases_of, check_op
from dsa.ops import op_modules


def _self_tests() -> dict[str, Callable[[str], None]]:
    modules = {name: importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)}
    families = {op: bridge.split(".")[-2] for op, bridge in op_modules().items()}
    tests = {op: getattr(modules.get(family), op, None) for op, family in families.items()}
    checked = {op: (lambda device, op=op: check_op(op, device, torch.initial_seed())) for op in tests}
    return {op: test or checked[op] for op, test in tests.items() if test or cases_of(op)}


SELF_TESTS = _self_tests()
