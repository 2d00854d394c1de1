"""Errors of `dsa tiny`: a full disk, and a directory that is not new or empty."""

from unittest.mock import Mock

from safetensors import SafetensorError

from dsa_layers.command.main import main
from dsa_layers.io import save as saving


def test_the_file_that_a_full_disk_does_not_take_is_named(tmp_path, monkeypatch, error):
    monkeypatch.setattr(saving, "save_file", Mock(side_effect=SafetensorError("No space left")))
    assert main(["tiny", str(tmp_path)]) == 2
    assert error().startswith(f"dsa tiny: {tmp_path}/model-00001-of-") and not (tmp_path / "config.json").exists()


def test_other_files_are_not_replaced(tmp_path, error):
    file = tmp_path / "thesis.tex"
    file.touch()
    for directory, problem in [
        (tmp_path, f"{tmp_path}: must be new or empty for a tiny checkpoint"),
        (file, f"{file}: "),
        (file / "within", f"{file / 'within'}: Not a directory"),
    ]:
        assert main(["tiny", str(directory)]) == 2
        assert error().startswith(f"dsa tiny: {problem}")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
