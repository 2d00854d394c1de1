"""Which GPU arch a kernel is for is said in rows of the table of kernels, and nowhere else in the bridges."""

import ast
import re
from pathlib import Path

import pytest
from dsa.source_digest import is_kernel, rows_in

ROOT = Path(__file__).parent.parent.parent
BRIDGES = sorted((ROOT / "dsa" / "ops").rglob("*.py"))
OF_AN_ARCH = re.compile(r"_sm\d+")


def stray_lines(source: str) -> list[str]:
    """Lines that name a kernel of an arch outside of docstrings and of rows of the table of kernels."""
    allowed: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or rows_in(node):
            allowed |= set(range(node.lineno, node.end_lineno + 1))
    lines = enumerate(source.splitlines(), 1)
    return [line for number, line in lines if number not in allowed and OF_AN_ARCH.search(line)]


@pytest.mark.parametrize("path", BRIDGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_are_named_in_rows_alone(path):
    assert not stray_lines(path.read_text())


def test_kernels_that_are_named_elsewhere_are_found():
    wrong = [
        "from dsa.kernels.gemm import cast_sm90 as kernels",
        "import dsa.kernels.gemm.cast_sm90",
        'kernels = importlib.import_module("dsa.kernels.gemm.cast_sm90")',
        'ROWS = {"gemm": "dsa.kernels.gemm.cast_sm90"}',
    ]
    for line in wrong:
        assert stray_lines(f"def f():\n    {line}\n") == [f"    {line}"]
    for rows in ('KERNELS = Kernels("f", {"sm_90": "dsa.kernels.gemm.cast_sm90"})', '"""Of cast_sm90."""'):
        assert not stray_lines(rows)


def test_a_row_names_modules_of_its_arch():
    rows = [row for path in BRIDGES for node in ast.walk(ast.parse(path.read_text())) for row in rows_in(node).items()]
    assert len(rows) > 30
    for arch, names in rows:
        assert any(map(is_kernel, names)), names
        for name in names:
            assert ROOT.joinpath(*name.split(".")).with_suffix(".py").exists(), name
            assert not is_kernel(name) or name.endswith(f"_{arch.replace('_', '')}"), (arch, name)
