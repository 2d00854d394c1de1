"""Tests with SGLang's own files, which tests/engines/sglang/test_files.py runs in a process of their own: stand-ins for
packages that are not installed are in the way of everybody else."""

import os

import pytest

collect_ignore_glob = [] if os.environ.get("DSA_SGLANG_IN_THIS_PROCESS") else ["test_*.py"]


@pytest.fixture(scope="session")
def loaded():
    """The names of modules behind SGLang's `load_plugins`."""
    from tests.engines.sglang.engine import process

    patch = pytest.MonkeyPatch()
    yield process.load_plugins(patch)
    patch.undo()


@pytest.fixture(scope="session")
def served(loaded):
    """What lay where hooks are now, and the backend of V3.2."""
    from tests.engines.sglang.engine import process

    patch = pytest.MonkeyPatch()
    with patch.context() as while_serving:
        result = process.serve(while_serving)
    process.publish(patch)
    yield result
    patch.undo()
