"""Run the tests in tests/engines/sglang/engine, which import SGLang's .py files, in a process of their own.

They are skipped unless DSA_SGLANG_FILES is set. It lists folders, separated as in PATH. The folders contain the .py
files and `kernels/jit` of the wheel of sglang 0.5.23, the .py files of sgl-deep-gemm 0.2.3.post2 or 0.2.5, and the
packages msgspec and dill. None of these needs to be installed, and no GPU is needed.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = os.environ.get("DSA_SGLANG_FILES")


@pytest.mark.skipif(not FILES, reason="DSA_SGLANG_FILES does not name folders with SGLang's .py files")
def test_in_sglang():
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, "tests/engines/sglang/engine"],
        cwd=root,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), FILES]), "DSA_SGLANG_IN_THIS_PROCESS": "1"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
