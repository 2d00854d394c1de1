"""Options, seeds and fixtures for all tests, and the selection of slow tests. torch gets one thread per test process,
because several processes share the cores, and torch's waiting threads spin."""

import random
import zlib
from pathlib import Path

import pytest
import torch

from dsa_layers.tiny import write_tiny_checkpoint
from tests.sampling import commit

torch.set_num_threads(1)
SLOW_PARTS = 20


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every slow test, and every shipped variant of every kernel")


def pytest_report_header() -> str:
    return f"slow tests and variants of kernels: samples of {commit()[:12]}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep about one in SLOW_PARTS of the slow tests, chosen by the commit hash. Keep all with --all or if paths are
    given."""
    if config.getoption("all") or config.option.file_or_dir:
        return
    left_out = [item for item in items if item.get_closest_marker("slow") and not in_sample(item.nodeid)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def in_sample(test: str) -> bool:
    return zlib.crc32(f"{commit()} {test}".encode()) % SLOW_PARTS == 0


# A test's seed depends only on its ID, because tests run in any order and in several processes. The seed is 0 before
# fixtures of a session or module. So their numbers do not depend on the first test that requests them.


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    _seed(0)


@pytest.fixture(autouse=True)
def _numbers_of_its_own(request: pytest.FixtureRequest) -> None:
    _seed(zlib.crc32(request.node.nodeid.encode()))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """Return the folder of a tiny checkpoint. Tests must not change it."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory)
    return directory
