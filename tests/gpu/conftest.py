"""GPU tests: skipped without a GPU that has kernels; each records its worst error for the receipt."""

from pathlib import Path

import pytest
import torch

from dsa import backends


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = backends.why_no_kernels()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
            elif item.get_closest_marker("several_gpus") and torch.cuda.device_count() < 2:
                item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def record_error(record_property):
    """Call with an error: the largest of an op's tests goes into the receipt."""
    return lambda error: record_property("error", float(error))
