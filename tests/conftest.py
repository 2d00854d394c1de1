"""What tests share: seeds, and which slow tests run. One thread per test process: on a shared machine, torch's spinning
threads cost far more than they bring.
"""

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
    """A run of the whole suite has one in SLOW_PARTS of the slow tests, others with every commit."""
    if config.getoption("all") or config.option.file_or_dir:
        return
    left_out = [item for item in items if item.get_closest_marker("slow") and not in_sample(item.nodeid)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def in_sample(test: str) -> bool:
    return zlib.crc32(f"{commit()} {test}".encode()) % SLOW_PARTS == 0


def pytest_make_parametrize_id(val: object) -> str | None:
    """A function's name, which is the same in every process; where tests run in several, they go by their ids."""
    return getattr(val, "__name__", None)


# Tests run in any order, in several processes: one that draws numbers without a seed gets the same ones each time,
# and so does what several tests share, whichever asks for it first.


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
    """The tiny FP8 checkpoint, to be read only."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory)
    return directory
