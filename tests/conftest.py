"""What tests share. One thread a test process: on a shared machine, torch's spinning threads cost far more than they
bring."""

import random
import zlib
from pathlib import Path

import pytest
import torch

from dsa_layers.tiny import write_tiny_checkpoint

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-variants", action="store_true", help="compile every shipped variant of every kernel, not only a sample"
    )


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
