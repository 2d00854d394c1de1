"""Cases of every public op: how to make arguments, how to check results, and which arguments to corrupt.

Each op family of dsa.ops has one or more modules here; attention.py and case.py define what several of them use. `dsa
check`, the tests on CPU and GPU, the fuzzer, and tests/ops/launched_arguments.py call ops with arguments that a case
makes.
"""

import importlib
import pkgutil

from dsa.cases.case import Case
from dsa.ops import op_modules

__all__ = ["CASES", "cases_of", "check_op"]

_modules = [importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)]
CASES: list[Case] = [case for module in _modules for case in getattr(module, "CASES", ())]


def cases_of(op: str) -> list[Case]:
    """Return the cases of all public functions that dsa/ops/FAMILY/OP.py defines. op: the module's name, OP."""
    functions = importlib.import_module(op_modules()[op]).__all__
    return [case for case in CASES if case.op in functions]


def check_op(op: str, device: str, seed: int = 0) -> None:
    """Run the cases of `cases_of(op)` that have a check, with all their sizes. Raise AssertionError if a result is
    wrong."""
    for case in cases_of(op):
        if case.check is not None:
            case.verify_all(device, seed)
