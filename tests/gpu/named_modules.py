"""Which modules of the project a file names: by imports, and by names that packages give, such as `dsa.rms_norm`.

`import dsa` alone would be all of dsa; a test or a benchmark has what it names of it.
"""

import ast
import functools
import re

from dsa import source_digest

PROJECT = ("dsa", "dsa_layers", "dsa_engines")
GIVING = ("dsa", "dsa.reference")  # whose __init__ gives names of many modules


@functools.cache
def modules_named_by(module: str, arch: str) -> frozenset[str]:
    """Those of PROJECT that a module imports itself; of GIVING the modules whose names it has."""
    path = source_digest._path_of(module, (module.partition(".")[0],))
    tree = source_digest._tree(path, arch)
    found = source_digest._imports(module, path, PROJECT, arch)
    if not found & {*GIVING}:
        return frozenset(found)
    text = ast.unparse(tree)  # without comments, and `_tree` is without docstrings
    for package in GIVING:
        names = {*re.findall(rf"\b{package.rpartition('.')[2]}\.(\w+)", text)} | _imported_from(package, tree)
        given = _given_by(package)
        found |= {given[name] for name in names & given.keys()}
    return frozenset(found - {*GIVING})


def _given_by(package: str) -> dict[str, str]:
    """{name: its module} of what a package's __init__ imports from its modules."""
    tree = source_digest._tree(source_digest._path_of(package))
    nodes = (node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module not in GIVING)
    return {alias.name: node.module for node in nodes for alias in node.names}


def _imported_from(package: str, tree: ast.Module) -> set[str]:
    nodes = source_digest._import_statements(tree)
    own = (node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == package)
    return {alias.name for node in own for alias in node.names}
