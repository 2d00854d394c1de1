"""Apply the example of docs/how-to/add-an-op.md to a copy of this project: it works without any other edit."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import receipt
from tests.project_copy import RECORDED, copy_project

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow
# Mark all entries of the receipt as verified without the example, so that only the example makes entries stale.
FRESH = """
from tests.gpu import receipt

data = receipt.load()
for arch, entries in data.items():
    for name, entry in entries.items():
        entry.update(receipt.digests(name, arch), unverified=None)
receipt.save(data)
"""
BLOCKS = re.findall(
    r"^```python (file|append)=(\S+)\n(.*?)^```", (ROOT / "docs/how-to/add-an-op.md").read_text(), re.S | re.M
)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return a copy of the project with the example's files and generated files. The record of machine code has
    placeholders for the example's variants."""
    copy = copy_project(tmp_path_factory.mktemp("project"))
    run(copy, "-c", FRESH)
    for kind, path, text in BLOCKS:
        if kind == "file":
            assert not (copy / path).exists(), path
            (copy / path).write_text(text)
        else:
            (copy / path).write_text(f"{(copy / path).read_text()}\n\n{text}")
    run(copy, "-c", RECORDED)
    run(copy, "-m", "tests.generate")
    return copy


def run(project, *command):
    done = subprocess.run(
        [sys.executable, *command], cwd=project, capture_output=True, text=True, env=environment(project)
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def environment(project):
    return os.environ | {"PYTHONPATH": str(project), "PYTEST_ADDOPTS": ""}


def test_the_example_is_on_every_floor():
    assert {path for kind, path, _ in BLOCKS if kind == "file"} == {
        "dsa/reference/elementwise/scale_rows.py",
        "dsa/kernels/elementwise/scale_rows_sm90.py",
        "dsa/ops/elementwise/scale_rows.py",
        "dsa_bench/elementwise/scale_rows.py",
        *(f"tests/{floor}/elementwise/test_scale_rows.py" for floor in ("ops", "kernels", "gpu")),
    }


def test_it_passes_the_lint_with_which_make_test_begins(project):
    run(project, "-m", "ruff", "check", "--no-cache", ".")
    run(project, "-m", "ruff", "format", "--check", "--no-cache", ".")


def test_its_own_tests_pass(project):
    floors = ("ops", "kernels", "gpu")
    printed = run(
        *(project, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *(f"tests/{floor}/elementwise/test_scale_rows.py" for floor in floors),
    )
    assert re.match(r"\.{4,}s\s", printed), printed


# Tests that loop over all ops. The pytest plugin WITHOUT_OTHERS deselects the parametrized tests of other ops and
# entries.
EVERYTHING = (
    *("tests/test_receipt.py", "tests/ops/test_self_checks.py", "tests/test_generated.py"),
    *("tests/test_imports.py", "tests/ops/test_tensor_kinds.py"),
    *("tests/test_cases.py", "tests/reference/test_exports.py", "tests/ops/test_torch_defaults.py"),
    "tests/reference/test_every_reference.py",
)
WITHOUT_OTHERS = """
import re

from tests.gpu import receipt
from tests.public_names import all_ops


def pytest_collection_modifyitems(items):
    others = {*all_ops(), *receipt.tested()} - {"scale_rows"}
    items[:] = [item for item in items if re.sub(r"\\w+(\\[(\\w*).*)?", r"\\2", item.name, flags=re.S) not in others]
"""


def test_nothing_else_misses_it(project):
    (project / "without_others.py").write_text(WITHOUT_OTHERS)
    printed = run(project, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-p", "without_others", *EVERYTHING)
    found = set(re.findall(r"^(tests/\S+?)::\S*\[scale_rows", printed, re.M))
    with_cases = ("tests/test_receipt.py", "tests/ops/test_self_checks.py", "tests/ops/test_torch_defaults.py")
    assert found >= {*with_cases, "tests/ops/test_tensor_kinds.py"}


def test_it_is_where_ops_are_looked_for(project):
    assert run(project, "-c", "from dsa_bench.harness import case; print(case.load('scale_rows').SHAPES)")
    assert "scale_rows" in run(
        project, "-c", "import dsa; print(dsa.__all__, dsa.runtime.backends.ARCHS['scale_rows'])"
    )
    assert "scale_rows" in run(project, "-c", "from dsa import reference; print(reference.__all__)")
    help_of_bench = "from dsa_layers.command.main import main; main(['bench', '--help'])"
    assert "scale_rows" in run(project, "-c", help_of_bench)
    assert "## scale_rows" in (project / "docs/reference/ops/elementwise.md").read_text()
    assert "| `scale_rows` | kernel | not run |" in (project / "docs/reference/status.md").read_text()


def test_rows_of_other_ops_stay_verified(project):
    """The entries in `receipt.WHOLES` run all ops of a family, so the example's kernel makes them stale. `without_it`
    names those that do not run the example's op."""
    script = "from tests.gpu import receipt; print({n: e['unverified'] for n, e in receipt.judged()['sm_90'].items()})"
    without_it = {"oldest_dsl", "sglang_adapters", "sglang_engine", "vllm_adapters", "vllm_engine"}
    entries = ast.literal_eval(run(project, "-c", script))
    stale = {name for name, why in entries.items() if why}
    assert stale == (receipt.WHOLES.keys() & entries.keys()) - without_it


def test_a_case_that_is_missing_is_noticed(project):
    path = project / "dsa/cases/elementwise.py"
    whole = path.read_text()
    path.write_text(whole.replace('Case("scale_rows"', 'Case("rms_norm"'))
    try:
        with pytest.raises(AssertionError, match="scale_rows"):
            test = "tests/ops/test_torch_defaults.py::test_every_op_has_a_call_with_all_of_its_arguments"
            run(project, "-m", "pytest", "-q", test)
    finally:
        path.write_text(whole)
