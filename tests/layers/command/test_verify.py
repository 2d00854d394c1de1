"""`dsa verify`: what its report says, and what it notices."""

import json
import math

import pytest

from dsa_layers import SHIPPED_MODEL
from dsa_layers.command import verify as command
from dsa_layers.command.main import main
from tests.layers.io.stand_ins import changed


def verify(checkpoint, tmp_path, monkeypatch):
    for name, value in {"_NEW_TOKENS": 3, "_SEQUENCES": (1, 2), "_STEPS": 3}.items():
        monkeypatch.setattr(command, name, value)
    text, report = tmp_path / "text.txt", tmp_path / "report.json"
    text.write_text("def area(width, height):\n    return width * height\n" * 3)
    code = main(["verify", str(checkpoint), "--device", "cpu", "--text", str(text), "--report", str(report)])
    return code, json.loads(report.read_text())


@pytest.mark.slow
def test_the_report_has_every_part_and_no_path(checkpoint, tmp_path, capsys, monkeypatch):
    code, report = verify(checkpoint, tmp_path, monkeypatch)
    assert code == 0 and report["checkpoint"]["model_type"] == "deepseek_v32"
    assert report["tensors"]["not_finite"] == [] and report["tensors"]["numbers"] > 10_000
    assert report["generation"]["same_twice"] and len(report["tokens_of_prompts"]) == 4
    assert len(report["config_sha256"]) == 64 and "torch" in report["versions"]
    assert 0 < report["text"]["loss"] < 20
    assert all(rate > 0 for name in ("prompts, tokens/s", "steps, tokens/s") for rate in report[name].values())
    assert str(tmp_path) not in json.dumps(report) and str(checkpoint) not in json.dumps(report)
    said = capsys.readouterr()
    assert "machine: device 1 x CPU" in said.out and "please attach it to an issue" in said.err


@pytest.mark.slow
def test_a_tensor_with_nan_is_named(checkpoint, tmp_path, monkeypatch):
    changed(checkpoint, tmp_path, lambda tensors: tensors["model.norm.weight"][3].fill_(math.nan))
    code, report = verify(tmp_path, tmp_path, monkeypatch)
    assert code == 1 and report["tensors"]["not_finite"] == ["model.norm.weight"]


@pytest.mark.slow
def test_nan_in_the_drafter_is_named(tmp_path, monkeypatch):
    nan = "model.layers.2.eh_proj.weight"
    changed(SHIPPED_MODEL, tmp_path, lambda tensors: tensors[nan][0, 0].fill_(math.nan))
    code, report = verify(tmp_path, tmp_path, monkeypatch)
    assert code == 1 and report["checkpoint"]["drafter"]
    assert [name for name in report["tensors"]["not_finite"] if "eh_proj" in name]


def test_wrong_options_are_refused_before_loading(checkpoint, tmp_path, error, monkeypatch):
    monkeypatch.setattr(command, "load", None)
    assert main(["verify", "--report", str(tmp_path / "missing" / "x.json")]) == 2
    assert error() == f"dsa verify: --report: there is no directory {tmp_path / 'missing'}"
    assert main(["verify", str(checkpoint), "--device", "cpu", "--text", "/dev/null"]) == 2
    assert error() == "dsa verify: --text: must have at least 2 tokens, got /dev/null with 1"
