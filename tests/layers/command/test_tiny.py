"""`dsa tiny`: what it writes, and what it replaces."""

import errno
from pathlib import Path
from unittest.mock import Mock

from safetensors import SafetensorError

from dsa_layers.command.main import main
from dsa_layers.io import shards


def test_a_checkpoint_that_generates_and_is_replaced(tmp_path, capsys):
    directory = tmp_path / "new" / "tiny"
    assert main(["tiny", str(directory), "--seed", "3"]) == 0
    assert capsys.readouterr().out == f"wrote {directory}\n"
    first = sorted(directory.glob("*.safetensors"))[0].read_bytes()
    assert main(["tiny", str(directory)]) == 0
    assert sorted(directory.glob("*.safetensors"))[0].read_bytes() != first
    size = ["--max-tokens", "2", "--cache-tokens", "256", "--device", "cpu"]
    assert main(["generate", str(directory), "--prompt", "a", *size]) == 0


def test_the_file_that_a_full_disk_does_not_take_is_named(tmp_path, monkeypatch, error):
    with monkeypatch.context() as patch:
        full = OSError(errno.ENOSPC, "No space left on device")
        patch.setattr(Path, "write_text", Mock(side_effect=full))
        assert main(["tiny", str(tmp_path)]) == 2
    assert error().endswith("/config.json: No space left on device")
    monkeypatch.setattr(shards, "save_file", Mock(side_effect=SafetensorError("No space left")))
    assert main(["tiny", str(tmp_path)]) == 2
    assert error().startswith(f"dsa tiny: {tmp_path}/model-00001-of-") and not (tmp_path / "config.json").exists()


def test_other_files_are_not_replaced(tmp_path, error):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["tiny", str(tmp_path)]) == 2
    assert error().startswith(f"dsa tiny: {tmp_path}: holds 'thesis.tex', which is not part of a tiny checkpoint")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
