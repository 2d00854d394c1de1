"""What `reference` may import, and what it exports."""

import ast
import pathlib

import pytest

import reference

FOLDER = pathlib.Path(reference.__file__).parent
STANDARD = {"collections", "dataclasses"}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.name)
def test_a_reference_imports_torch_and_references_only(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            roots = set() if node.level == 1 else {(node.module or "..").split(".")[0]}
        else:
            continue
        assert roots <= {"torch", *STANDARD}


def test_every_exported_name_exists_and_is_documented():
    for name in reference.__all__:
        assert getattr(reference, name).__doc__, name


def test_no_exported_name_hides_a_module():
    modules = {path.stem for path in FOLDER.glob("*.py")}
    # `hadamard` the module and `hadamard_transform` the function, say: `from reference import topk` is the module.
    assert modules.isdisjoint(reference.__all__)
