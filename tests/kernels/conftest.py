"""Parameters of tests of kernels: the variants that `variants.shipped` asks for."""

import pytest

from tests.kernels.variants import sample, shipped_variants_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("shipped_variants")
    if marker is None:
        return
    variants = []
    for compile_function in marker.args:
        shipped = shipped_variants_of(compile_function)
        variants += shipped if metafunc.config.getoption("all_variants") else sample(shipped)
    if "compile_function" in metafunc.fixturenames:
        ids = [f"{compile_function.__name__}-{arguments}" for compile_function, arguments in variants]
        metafunc.parametrize(("compile_function", "arguments"), variants, ids=ids)
    else:
        metafunc.parametrize("arguments", [arguments for _, arguments in variants], ids=str)
