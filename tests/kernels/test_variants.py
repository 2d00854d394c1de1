"""No shipped kernel is without a test of its machine code, and the sample of an ordinary run has every kernel."""

from pathlib import Path

import pytest

from tests.kernels.variants import all_compile_functions, sample, shipped_variants_of


def test_every_compile_function_has_a_test(request):
    here = Path(__file__).parent
    items = [item for item in request.session.items if here in item.path.parents]
    if {item.path for item in items} != set(here.rglob("test_*.py")):
        pytest.skip("only some of the kernels' tests were collected")
    # Those beside this file are of all kernels, whatever these compute.
    marked = [item.get_closest_marker("shipped_variants") for item in items if item.path.parent != here]
    tested = {compile_function for marker in marked if marker for compile_function in marker.args}
    assert tested == all_compile_functions()


@pytest.mark.parametrize("compile_function", sorted(all_compile_functions(), key=lambda f: f.__name__))
def test_the_sample_has_every_compile_function(compile_function):
    variants = shipped_variants_of(compile_function)
    chosen = sample(variants)
    assert chosen and set(chosen) <= set(variants) and len(chosen) <= 1 + len(variants) // 16
    assert sample(variants[::-1]) == chosen


def test_a_new_variant_moves_one_out_at_the_most():
    variants = [(sample, (f"dtype {i}", 128)) for i in range(100)]
    chosen = sample(variants)
    assert len(chosen) == 2
    for i in range(100, 120):
        assert len(set(chosen) - set(sample([*variants, (sample, (f"dtype {i}", 128))]))) <= 1
