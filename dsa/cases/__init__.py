"""Cases of every public op: arguments by seed and size, what is right about the results, and hostile contents.

Modules by family, as in dsa.ops; a large family has two or three. `dsa check`, the tests on CPUs and GPUs, the fuzzer,
the digests of launches and benchmarks call ops with what a case makes.
"""

import importlib
import pkgutil

from dsa.cases.case import Case
from dsa.ops import op_modules

__all__ = ["CASES", "cases_of", "check_op"]

_modules = [importlib.import_module(f"{__name__}.{name}") for _, name, _ in pkgutil.iter_modules(__path__)]
CASES: list[Case] = [case for module in _modules for case in getattr(module, "CASES", ())]


def cases_of(op: str) -> list[Case]:
    """Those of the functions in dsa/ops/FAMILY/OP.py."""
    functions = importlib.import_module(op_modules()[op]).__all__
    return [case for case in CASES if case.op in functions]


def check_op(op: str, device: str, seed: int = 0) -> None:
    """AssertionError where a result of one of the op's cases is not right."""
    for case in cases_of(op):
        if case.check is not None:
            case.verify_all(device, seed)
