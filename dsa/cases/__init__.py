"""Cases of every public op: how to make arguments, how to check results, and which arguments to corrupt.

There is a module per op family, as in dsa.ops, and several modules for a large family. `dsa check`, the tests on CPU
and GPU, the fuzzer, the digests of launches (tests/ops/launched_arguments.py), and benchmarks call ops with arguments
that a case makes (case.py).
"""

import importlib
import pkgutil

from dsa.cases.case import Case
from dsa.ops import op_modules

__all__ = ["CASES", "cases_of", "check_op"]

_modules = [importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)]
CASES: list[Case] = [case for module in _modules for case in getattr(module, "CASES", ())]


def cases_of(op: str) -> list[Case]:
    """Return the cases of the public functions in dsa/ops/FAMILY/OP.py."""
    functions = importlib.import_module(op_modules()[op]).__all__
    return [case for case in CASES if case.op in functions]


def check_op(op: str, device: str, seed: int = 0) -> None:
    """Run every case of the op that has a check; raise AssertionError if a result is wrong."""
    for case in cases_of(op):
        if case.check is not None:
            case.verify_all(device, seed)
