"""A quick test of every public op on one device, against short float64 formulas. `dsa check` runs them.

A module a family; SELF_TESTS has them by the name of the op's module.
"""

from collections.abc import Callable

from dsa.self_test import cache, elementwise, gemm, indexer, mla, moe, training

FAMILIES = (gemm, moe, elementwise, indexer, cache, mla, training)
SELF_TESTS: dict[str, Callable[[str], None]] = {name: test for f in FAMILIES for name, test in f.TESTS.items()}
