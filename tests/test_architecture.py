"""docs/architecture.md shows how an op is added: what it shows works, in a copy of this project, with no other edit."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(
    r"^```python (file|append)=(\S+)\n(.*?)^```", (ROOT / "docs/architecture.md").read_text(), re.S | re.M
)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the project with the example's files, its entry of the receipt, and what is generated."""
    copy = tmp_path_factory.mktemp("project")
    leave = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.png")
    for folder in ("dsa", "dsa_layers", "dsa_bench", "docs", "tests", "examples"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=leave)
    for file in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / file, copy)
    for kind, path, text in BLOCKS:
        if kind == "file":
            assert not (copy / path).exists(), path
            (copy / path).write_text(text)
        else:
            (copy / path).write_text(f"{(copy / path).read_text()}\n\n{text}")
    receipt = copy / "tests/gpu/receipt.json"
    entries = json.loads(receipt.read_text())
    entries["sm_90"]["scale_rows"] = {"unverified": "has not run on a GPU"}
    receipt.write_text(json.dumps(entries))
    run(copy, "-m", "tests.generate")
    return copy


def run(project, *command):
    done = subprocess.run(
        [sys.executable, *command], cwd=project, capture_output=True, text=True, env=environment(project)
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def environment(project):
    return os.environ | {"PYTHONPATH": str(project), "PYTHONDONTWRITEBYTECODE": "1"}


def test_the_example_is_on_every_floor():
    assert {path for kind, path, _ in BLOCKS if kind == "file"} == {
        "dsa/reference/elementwise/scale_rows.py",
        "dsa/kernels/elementwise/scale_rows_sm90.py",
        "dsa/ops/elementwise/scale_rows.py",
        "dsa_bench/elementwise/scale_rows.py",
        *(f"tests/{floor}/elementwise/test_scale_rows.py" for floor in ("reference", "ops", "kernels", "gpu")),
    }


def test_its_own_tests_pass(project):
    floors = ("reference", "ops", "kernels", "gpu")
    printed = run(
        *(project, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *(f"tests/{floor}/elementwise/test_scale_rows.py" for floor in floors),
    )
    assert re.match(r"\.{8,}s{9}\s", printed), printed  # the GPU's are skipped here


def test_nothing_else_misses_it(project):
    """Lists that are generated, calls that all ops have, self tests, benchmarks, imports, receipts."""
    chosen = ["tests/test_generated.py", "tests/test_imports.py", "tests/ops/test_torch_defaults.py"]
    chosen += ["tests/ops/test_tensor_kinds.py", "tests/layers/command/test_check.py::test_every_op_has_a_self_test"]
    entries = "tests/test_receipt.py::test_every_test_on_a_gpu_is_an_entry"
    run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, entries)
    assert run(project, "-c", "from dsa_bench.harness import case; print(case.load('scale_rows').SHAPES)")
    assert "scale_rows" in run(project, "-c", "import dsa; print(dsa.__all__, dsa.backends.KERNELS['scale_rows'])")
    assert "### scale_rows" in (project / "docs/ops.md").read_text()


def test_a_floor_that_is_missing_is_noticed(project):
    """The op without a valid call, as an example of a test that says what is missing."""
    path = project / "tests/valid_calls/elementwise.py"
    whole = path.read_text()
    path.write_text(whole.replace('@valid("scale_rows"', '@valid("rms_norm"'))
    try:
        with pytest.raises(AssertionError, match="scale_rows"):
            run(
                project,
                "-m",
                "pytest",
                "-q",
                "tests/ops/test_torch_defaults.py::test_every_op_has_a_call_with_all_of_its_arguments",
            )
    finally:
        path.write_text(whole)
