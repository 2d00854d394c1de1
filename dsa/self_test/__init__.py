"""A quick test of every public op on one device, against short float64 formulas. `dsa check` runs them.

A module a family, as in dsa.ops. The test of the op `dsa/ops/FAMILY/OP.py` is the function OP of its family's module:
it takes the device, and raises AssertionError where the op is wrong. The caches' own reads and writes have none: they
feed the tests of the ops that use them.
"""

from collections.abc import Callable

from dsa.self_test import cache, elementwise, gemm, indexer, mla, moe, training
from dsa.source_digest import op_modules

SELF_TESTS: dict[str, Callable[[str], None]] = {
    op: getattr(tests, op)
    for tests in (gemm, moe, elementwise, indexer, cache, mla, training)
    for op, bridge in op_modules().items()
    if bridge.split(".")[-2] == tests.__name__.split(".")[-1] and hasattr(tests, op)
}
