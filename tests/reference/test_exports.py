"""The names that `dsa.reference` exports."""

from pathlib import Path

from dsa import reference


def test_every_exported_name_exists_and_is_documented():
    for name in reference.__all__:
        assert getattr(reference, name).__doc__, name


def test_no_exported_name_hides_a_module():
    # `from dsa.reference import gemm` must return the package, so an exported function must not have the name gemm.
    modules = {path.stem for path in Path(reference.__file__).parent.glob("*")}
    assert modules.isdisjoint(reference.__all__)
