"""Which variants are shipped, and which of them the tests compile."""

from pathlib import Path

import pytest

from tests.kernels.variants import all_compile_functions, sample, shipped_variants_of

by_function = pytest.mark.parametrize(
    "compile_function", sorted(all_compile_functions(), key=lambda function: function.__name__)
)


def test_every_compile_function_has_a_test(request):
    here = Path(__file__).parent
    items = [item for item in request.session.items if here in item.path.parents]
    if {item.path for item in items} != set(here.rglob("test_*.py")):
        pytest.skip("only some of the kernels' tests were collected")
    # A compile function needs a test in the folder of the function's family. The tests in this folder run for all
    # compile functions, so they do not count.
    marked = [item.get_closest_marker("shipped_variants") for item in items if item.path.parent != here]
    tested = {compile_function for marker in marked if marker for compile_function in marker.args}
    assert tested == all_compile_functions()


@by_function
def test_every_variant_is_shipped_once(compile_function):
    variants = shipped_variants_of(compile_function)
    assert len(variants) == len(set(variants))


@by_function
def test_the_sample_has_every_compile_function(compile_function):
    variants = shipped_variants_of(compile_function)
    chosen = sample(variants)
    assert chosen and set(chosen) <= set(variants) and len(chosen) <= 1 + len(variants) // 16
    assert sample(variants[::-1]) == chosen


def test_a_new_variant_replaces_at_most_one_of_the_sample():
    variants = [(sample, (f"dtype {i}", 128)) for i in range(100)]
    chosen = sample(variants)
    assert len(chosen) == 2
    for i in range(100, 120):
        assert len(set(chosen) - set(sample([*variants, (sample, (f"dtype {i}", 128))]))) <= 1
