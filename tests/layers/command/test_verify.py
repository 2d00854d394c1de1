"""`dsa verify`: what its report says, and what it notices."""

import json
import math

import pytest
import torch

from dsa_layers import SHIPPED_MODEL
from dsa_layers.command import verify as command
from dsa_layers.command.main import main
from dsa_layers.evaluation.verification import Difference
from tests.layers.io.stand_ins import changed


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    for name, value in {"_NEW_TOKENS": 3, "_SEQUENCES": (1, 2), "_STEPS": 3}.items():
        monkeypatch.setattr(command, name, value)


def verify(checkpoint, tmp_path, *options):
    report = tmp_path / "report.json"
    text = tmp_path / "text.txt"
    text.write_text("def area(width, height):\n    return width * height\n" * 3)
    code = main(["verify", str(checkpoint), "--device", "cpu", "--text", str(text), "--report", str(report), *options])
    return code, json.loads(report.read_text()) if report.exists() else None


@pytest.mark.slow
def test_the_report_has_every_part_and_no_path(checkpoint, tmp_path, capsys):
    code, report = verify(checkpoint, tmp_path)
    assert code == 0 and report["checkpoint"]["model_type"] == "deepseek_v32"
    assert report["tensors"]["not_finite"] == [] and report["tensors"]["numbers"] > 10_000
    assert report["generation"]["same_twice"] and len(report["generation"]["tokens_of_prompts"]) == 4
    assert 0 < report["text"]["loss"] < 20
    assert all(rate > 0 for rate in report["prompts, tokens/s"].values())
    assert str(tmp_path) not in json.dumps(report) and str(checkpoint) not in json.dumps(report)
    said = capsys.readouterr()
    assert "machine: device 1 x CPU" in said.out and "please attach it to an issue" in said.err


@pytest.mark.slow
def test_a_tensor_with_nan_is_named(checkpoint, tmp_path):
    changed(checkpoint, tmp_path, lambda tensors: tensors["model.norm.weight"][3].fill_(math.nan))
    code, report = verify(tmp_path, tmp_path)
    assert code == 1 and report["tensors"]["not_finite"] == ["model.norm.weight"]


@pytest.mark.slow
def test_nan_in_the_drafter_is_named(tmp_path):
    nan = "model.layers.2.eh_proj.weight"
    changed(SHIPPED_MODEL, tmp_path, lambda tensors: tensors[nan][0, 0].fill_(math.nan))
    code, report = verify(tmp_path, tmp_path)
    assert code == 1 and report["checkpoint"]["drafter"]
    assert [name for name in report["tensors"]["not_finite"] if "eh_proj" in name]


def test_a_report_that_cannot_be_written_is_refused_before_loading(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "load", None)
    assert main(["verify", "--report", str(tmp_path / "missing" / "x.json")]) == 2
    assert capsys.readouterr().err.startswith("dsa verify: --report: there is no directory")


@pytest.mark.parametrize("path", ["/dev/full", SHIPPED_MODEL / "config.json", SHIPPED_MODEL / "held_out.txt"])
def test_a_file_that_is_no_report_is_not_replaced(path, capsys, monkeypatch):
    monkeypatch.setattr(command, "load", None)
    assert main(["verify", "--report", str(path)]) == 2
    told = f"--report: must be a new or empty file, or an earlier report, got {path}"
    assert capsys.readouterr().err == f"dsa verify: {told}\n"


def test_an_earlier_report_is_replaced(tmp_path):
    path = tmp_path / "report.json"
    path.touch()
    assert command._may_be_replaced(path)
    report = command._Report()
    report.add("machine", {})
    report.add("checkpoint", {})
    path.write_text(report.text())
    assert command._may_be_replaced(path)


def test_a_report_with_nan_is_json():
    report = command._Report()
    report.add("text", {"loss": math.nan, "rates": [1.0, math.inf]})
    assert json.loads(report.text(), parse_constant=pytest.fail) == {"text": {"loss": "nan", "rates": [1.0, "inf"]}}


def test_a_text_of_one_token_is_refused_before_loading(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(command, "load", None)
    assert main(["verify", str(checkpoint), "--device", "cpu", "--text", "/dev/null"]) == 2
    told = "dsa verify: --text: must have at least 2 tokens, got /dev/null with 1\n"
    assert capsys.readouterr().err == told


def test_a_difference_is_its_formulas():
    logits, expected = torch.randn(2, 5, 7, dtype=torch.float64)
    targets = torch.randint(7, (5,))
    found = Difference.between(logits, expected, targets)
    q, p = logits.log_softmax(-1), expected.log_softmax(-1)
    own, theirs = (-x[torch.arange(5), targets] for x in (q, p))
    assert found.loss == pytest.approx(own.mean().item()) and found.expected_loss == pytest.approx(theirs.mean().item())
    assert found.divergence == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item())
    assert found.largest == pytest.approx((own - theirs).abs().max().item())
    assert found.same_first == (logits.argmax(-1) == expected.argmax(-1)).double().mean().item()
