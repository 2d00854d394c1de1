"""What tests share. One thread a test process: on a shared machine, torch's spinning threads cost far more than they
bring."""

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


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """The tiny FP8 checkpoint, to be read only."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory)
    return directory
