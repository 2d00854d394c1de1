"""What several layer tests share."""

from pathlib import Path

import pytest

from dsa_layers.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """The tiny FP8 checkpoint, to be read only."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_checkpoint(directory)
    return directory
