"""The examples of the README and the documents run as they stand there."""

import re
import shlex
from pathlib import Path

import pytest

from dsa_layers.command.main import main
from tests.gpu.receipt import python_blocks

TEXT = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.parametrize("block", python_blocks(), ids=lambda block: f"{len(block)} characters")
def test_the_documents_python(block):
    exec(block, {})


def test_the_three_examples():
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.S | re.M)
    assert len(blocks) == 3
    scores, checkpoint, training = ({}, {}, {})
    for block, names in zip(blocks, (scores, checkpoint, training)):
        exec(block, names)
    assert scores["indices"].shape == (64, 128) and (scores["indices"] >= 0).all()
    assert checkpoint["logits"].shape == (2, 257) and all(len(done.tokens) for done in checkpoint["done"])
    assert all(parameter.grad is not None for parameter in training["stage"].parameters())


def test_the_tiny_checkpoints(tmp_path, monkeypatch, capsys):
    """The commands on them, but for the number of tokens."""
    monkeypatch.chdir(tmp_path)
    commands = [shlex.split(line, comments=True)[1:] for line in re.findall(r"^dsa \w+ \.tiny.*", TEXT, re.M)]
    assert [command[0] for command in commands] == ["tiny", "generate"] * 3
    for command in commands:
        short = ["--max-new-tokens", "2", "--device", "cpu"] if command[0] == "generate" else []
        assert main(command + short) == 0, capsys.readouterr().err


def test_every_path_and_command_exists():
    root = Path(__file__).parent.parent
    for path in re.findall(r"^\| `([\w/.-]+)` \|", TEXT, re.M):
        if "/" in path:
            assert (root / path).exists(), path
    contributing = (root / "CONTRIBUTING.md").read_text()
    for path in re.findall(r"`([\w.-]+/[\w/.-]*)`", contributing):
        assert (root / path).exists(), path
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    assert set(re.findall(r"^make ([\w-]+)", TEXT + contributing, re.M)) <= targets
