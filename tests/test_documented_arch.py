"""Apply the example of docs/how-to/add-a-gpu.md, a kernel for sm_100, to a copy of this project. The kernel compiles
for sm_100, documents name the arch, and the receipt's entries for sm_90 stay valid."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project_copy import RECORDED, copy_project

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "how-to" / "add-a-gpu.md").read_text()
FILES = re.findall(r"^```python (file|append)=(\S+)\n(.*?)^```", TEXT, re.S | re.M)
DIGESTS = """
from tests.gpu import receipt

print({name: receipt.digests(name, "sm_90") for name in ("rms_norm", "fuzz")})
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    return copy_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def digests_before(project):
    return run(project, "-c", DIGESTS)


@pytest.fixture(scope="module")
def extended(project, digests_before):
    """The record of machine code has placeholders for the example's variants."""
    for act, path, text in FILES:
        assert (project / path).exists() == (act == "append"), path
        with (project / path).open("a") as file:
            file.write(f"\n\n{text}" if act == "append" else text)
    run(project, "-c", RECORDED)
    run(project, "-m", "tests.generate")
    return project


def run(project, *command, returncode=0):
    environment = os.environ | {"PYTHONPATH": str(project), "PYTEST_ADDOPTS": ""}
    done = subprocess.run([sys.executable, *command], cwd=project, capture_output=True, text=True, env=environment)
    assert done.returncode == returncode, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def test_it_compiles_for_that_arch(extended):
    script = """
import importlib

import dsa
from dsa.runtime import backends
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import disassemble

assert backends.ARCHS["rms_norm"] == ["sm_90", "sm_100"] and backends.archs() == ["sm_100", "sm_90"]
found = []
for arch, module in (("sm_90", "rms_norm_sm90"), ("sm_100", "rms_norm_sm100")):
    module = f"dsa.kernels.elementwise.{module}"
    kernels = importlib.import_module(module)
    code = cubin(kernels.compile_rms_norm, "bfloat16", True, kernels.choose_config("bfloat16", 512))
    assert disassemble(code).stack == 0
    found.append(code)
assert found[0] != found[1] and b"sm_100a" in found[1] and b"sm_100a" not in found[0]
"""
    run(extended, "-c", script)


def test_what_has_no_row_there_runs_the_reference(extended):
    """The kernel of rms_norm's gradients has a launch only for sm_90."""
    script = """
import warnings

import torch

from dsa.runtime import backends
from dsa.ops.elementwise._rms_norm_gradient import has_kernel

class OnBlackwell(torch.Tensor):
    device = torch.device("cuda", 0)

backends.why_no_kernels, backends.arch_of = lambda *_: None, lambda _: "sm_100"
on_gpu = torch.zeros(3, 8, device="meta").as_subclass(OnBlackwell)
assert backends.runs_kernel("rms_norm", on_gpu)
with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    assert not has_kernel(on_gpu)
assert "has no sm_100 kernel yet" in str(found[0].message)
"""
    run(extended, "-c", script)


def test_the_other_archs_entries_stay_valid(extended, digests_before):
    assert run(extended, "-c", DIGESTS) == digests_before


def test_documents_name_the_arch(extended):
    assert "sm_90 (Hopper), sm_100 (Blackwell)" in (extended / "docs/reference/ops/index.md").read_text()
    status = (extended / "docs/reference/status.md").read_text()
    (table,) = re.findall(r"^## sm_100 \(Blackwell\)\n(.*?)^## ", status, re.S | re.M)
    assert "\n| `rms_norm` | kernel | not run |" in table and "Nothing is measured." in table
