"""`dsa_layers` names what users import, and every document imports these names from it."""

import ast
import re
from pathlib import Path

import pytest

import dsa_layers

ROOT = Path(__file__).parents[2]
# These pages change the package itself.
INSIDE = ("docs/how-to/add-a-family.md",)
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py"))
    if str(path.relative_to(ROOT)) not in INSIDE
]


def imports(text):
    """(module, name) of each `from dsa_layers... import ...`."""
    for module, names in re.findall(r"^\s*from (dsa_layers[\w.]*) import \(?([\w, \n]+)\)?$", text, re.M):
        yield from ((module, name.strip()) for name in names.split(",") if name.strip())


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
    found = {(module, name) for module, name in imports(path.read_text()) if name in dsa_layers.__all__}
    assert {module for module, _ in found} <= {"dsa_layers"}, found
