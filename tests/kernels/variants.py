"""Which shipped variants of a kernel a run of the tests compiles: a sample, or all of them with --all."""

import hashlib
import importlib
import math
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import dsa.kernels
from tests.sampling import commit

Variant = tuple[Callable[..., Any], tuple[Any, ...]]


def shipped(*compile_functions: Callable[..., Any]) -> pytest.MarkDecorator:
    """A test of each shipped variant of these functions: its arguments are `arguments`, and `compile_function` where
    it has that."""
    return pytest.mark.shipped_variants.with_args(*compile_functions)


def shipped_variants_of(compile_function: Callable[..., Any]) -> list[Variant]:
    """Those that the kernel's module names."""
    module = sys.modules[compile_function.__module__]
    return [variant for variant in module.shipped_variants() if variant[0] is compile_function]


def sample(variants: Sequence[Variant]) -> list[Variant]:
    """One, 2 of 64 or 3 of 192 variants of a compile function, the same for all tests: those whose arguments have the
    lowest hashes, so that a new variant moves few others out or in. The next commit has others."""
    count = max(1, math.isqrt(len(variants) // 16))
    return sorted(variants, key=_hash)[:count]


def all_compile_functions() -> set[Callable[..., Any]]:
    """Of all kernels' modules."""
    names = [name for _, name, _ in pkgutil.walk_packages(dsa.kernels.__path__, f"{dsa.kernels.__name__}.")]
    modules = [importlib.import_module(name) for name in names]
    variants = [module.shipped_variants() for module in modules if hasattr(module, "shipped_variants")]
    return {compile_function for shipped_of_module in variants for compile_function, _ in shipped_of_module}


def _hash(variant: Variant) -> bytes:
    return hashlib.sha256(f"{commit()} {variant[1]!r}".encode()).digest()
