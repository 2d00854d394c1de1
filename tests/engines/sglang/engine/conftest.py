"""Tests that import SGLang's .py files, with stand-ins for packages that are not installed.
tests/engines/sglang/test_files.py runs these tests in a separate process, because the stand-ins would disturb other
tests."""

import os

import pytest

collect_ignore_glob = [] if os.environ.get("DSA_SGLANG_IN_THIS_PROCESS") else ["test_*.py"]


@pytest.fixture(scope="session")
def loaded():
    """Run SGLang's `load_plugins`, and return the names of all modules that are loaded at its end."""
    from tests.engines.sglang.engine import process

    patch = pytest.MonkeyPatch()
    yield process.load_plugins(patch)
    patch.undo()


@pytest.fixture(scope="session")
def served(loaded):
    """Return the object that `process.serve` returns. It has `before`, the attributes that hooks have replaced, as they
    were before, and `backend`, V3.2's backend."""
    from tests.engines.sglang.engine import process

    patch = pytest.MonkeyPatch()
    with patch.context() as while_serving:
        result = process.serve(while_serving)
    process.publish(patch)
    yield result
    patch.undo()
