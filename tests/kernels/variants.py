"""The shipped variants that a run of the tests compiles (a sample, or every variant with --all), and their SASS."""

import hashlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import Sass, disassemble
from tests.kernels import machine_code
from tests.sampling import commit

Variant = tuple[Callable[..., Any], tuple[Any, ...]]


def shipped(*compile_functions: Callable[..., Any]) -> pytest.MarkDecorator:
    """Run a test for a sample of these compile functions' shipped variants, or with --all for all of them. The test can
    use the fixtures `sass`, `in_order`, `compile_function` and `arguments`."""
    return pytest.mark.shipped_variants.with_args(*compile_functions)


def sass_of(compile_function: Callable[..., Any], *arguments: Any) -> Sass:
    return disassemble(cubin(compile_function, *arguments))


def assert_counts(sass: Sass, **expected: int) -> None:
    assert {name: sass.instructions[name] for name in expected} == expected


def shipped_variants_of(compile_function: Callable[..., Any]) -> list[Variant]:
    module = sys.modules[compile_function.__module__]
    return [variant for variant in module.shipped_variants() if variant[0] is compile_function]


def sample(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants with the lowest hashes of commit and arguments. So all tests of one commit use the same
    variants, and a new variant replaces at most one of them."""
    count = max(1, math.isqrt(len(variants) // 16))
    return sorted(variants, key=_hash)[:count]


def all_compile_functions() -> set[Callable[..., Any]]:
    variants = [machine_code.shipped(family).values() for family in machine_code.families()]
    return {compile_function for shipped_of_family in variants for compile_function, _ in shipped_of_family}


def _hash(variant: Variant) -> bytes:
    return hashlib.sha256(f"{commit()} {variant[1]!r}".encode()).digest()
