"""Fixtures and collection of the GPU tests.

Without a GPU that the kernels support, one test of each file is skipped, so that pytest reports the reason. The file's
other tests are deselected.
"""

from pathlib import Path

import pytest
import torch

from dsa.runtime import backends

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = backends.why_no_kernels()
    few = torch.cuda.device_count() < 2
    ours = [item for item in items if FOLDER in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif few and item.get_closest_marker("several_gpus"):
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))
    if reason:
        left_out = {*ours} - {*{item.path: item for item in ours}.values()}
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def record_error(record_property):
    """Return a function that records an error. The receipt (tests/gpu/receipt.py) has the largest error of each op's
    tests."""
    return lambda error: record_property("error", float(error))
