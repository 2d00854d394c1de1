"""Fixtures for tests that import SGLang's .py files, with stand-ins for packages that are not installed.
tests/engines/sglang/test_files.py runs these tests in another process, because the stand-ins would disturb other
tests."""

import os

import pytest

collect_ignore_glob = [] if os.environ.get("DSA_SGLANG_IN_THIS_PROCESS") else ["test_*.py"]


@pytest.fixture(scope="session")
def loaded():
    """Run SGLang's `load_plugins`. Return the names of all modules that are loaded then."""
    from tests.engines.sglang.engine import process

    patch = pytest.MonkeyPatch()
    yield process.load_plugins(patch)
    patch.undo()


@pytest.fixture(scope="session")
def served(loaded):
    from tests.engines.sglang.engine import process

    patch = pytest.MonkeyPatch()
    process.publish(patch)
    with patch.context() as while_serving:
        result = process.serve(while_serving)
    yield result
    patch.undo()
