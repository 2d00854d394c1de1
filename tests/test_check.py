"""`dsa check`: what its report says. tests/ops/test_self_checks.py has the tests of ops that it runs."""

import importlib.metadata
import re

import pytest

import dsa
from dsa import check
from dsa.ops import op_modules
from dsa.runtime import backends
from dsa_layers.command.main import main
from tests.ops.wrong_ops import break_op, swapped


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(backends, "why_no_kernels", lambda: "no GPU for this test")
    monkeypatch.delenv("DSA_BACKEND", raising=False)


def outcomes(report):
    """{op: what the report says of it}"""
    return dict(re.findall(r"^  (\w+) +(?:kernel|reference) +[\d.]+ s  (.*)$", report, re.MULTILINE))


def test_the_report(monkeypatch, capsys):
    monkeypatch.setattr(check, "PACKAGES", ("torch", "no-such-package"))
    assert main(["check"]) == 0
    report = capsys.readouterr().out
    assert f"torch {importlib.metadata.version('torch')}\nno-such-package not installed\n" in report
    assert "GPU: none\nbackend: reference (no GPU for this test)\n" in report
    assert outcomes(report) == dict.fromkeys(op_modules(), "ok")
    assert report.endswith(f"{len(op_modules())} of {len(op_modules())} ops passed\n")


def test_an_op_that_fails_does_not_hide_the_others(monkeypatch, capsys):
    def op(*args, **kwargs):
        raise RuntimeError("no image for this device")

    monkeypatch.setattr(dsa, "fp8_mqa_logits", op)
    break_op(monkeypatch, "topk_indices", swapped)
    assert main(["check"]) == 1
    report = capsys.readouterr().out
    found = outcomes(report)
    assert found.pop("fp8_mqa_logits") == "FAILED: RuntimeError: no image for this device"
    assert found.pop("topk_indices").startswith("FAILED: AssertionError: ")
    assert set(found.values()) == {"ok"}
    assert report.endswith(f"{len(found)} of {len(op_modules())} ops passed\n")
