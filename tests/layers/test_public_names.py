"""Tests of `dsa_layers`' public names: they exist, the stub has them, and documents import them from the package."""

import ast
import re
from pathlib import Path

import pytest

import dsa_layers

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]
DOCUMENTS.remove(ROOT / "docs" / "how-to" / "add-a-family.md")  # shows a module inside the package


@pytest.mark.parametrize("name", dsa_layers._MODULES)
def test_every_public_name_is_there(name):
    value = getattr(dsa_layers, name)
    assert value.__module__ == dsa_layers._MODULES[name]
    assert name in dir(dsa_layers)


def test_the_list_is_what_type_checkers_see():
    stub = ast.parse(Path(dsa_layers.__file__).with_suffix(".pyi").read_text())
    found = [node for node in stub.body if isinstance(node, ast.ImportFrom) and node.module != "pathlib"]
    listed = {(node.module, alias.name) for node in found for alias in node.names}
    assert listed == {(module, name) for name, module in dsa_layers._MODULES.items()}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_import_public_names_from_the_package(path):
    imports = re.findall(r"^\s*from (dsa_layers[\w.]*) import \(?([\w, \n]+)\)?$", path.read_text(), re.M)
    found = {(module, name) for module, names in imports for name in re.findall(r"\w+", names)}
    assert {module for module, name in found if name in dsa_layers.__all__} <= {"dsa_layers"}, found
