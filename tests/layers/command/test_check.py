"""`dsa check`: every self test passes, and each fails when its op is wrong."""

import importlib.metadata
import re

import pytest
import torch

import dsa
from dsa.cases import cases_of, check_op
from dsa.ops import op_modules
from dsa.runtime import backends
from dsa_layers.command import check
from dsa_layers.command.main import main
from tests.layers.command.wrong_ops import MISLED, OP_OF, WRONG, break_op, mislead_op, swapped


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(backends, "why_no_kernels", lambda: "no GPU for this test")
    monkeypatch.delenv("DSA_BACKEND", raising=False)


@pytest.mark.parametrize("name", op_modules())
def test_ops_pass_whatever_the_numbers(name):
    assert any(case.check for case in cases_of(name))
    for seed in range(5):
        check_op(name, "cpu", seed)


@pytest.mark.parametrize(("function", "wrong"), WRONG.values(), ids=WRONG)
def test_a_wrong_op_is_found(monkeypatch, function, wrong):
    break_op(monkeypatch, function, wrong)
    with pytest.raises(AssertionError):
        check_op(OP_OF[function], "cpu")


def test_every_check_is_shown_to_fail():
    assert {OP_OF[function] for function, _ in WRONG.values()} == op_modules().keys()


@pytest.mark.parametrize("misled", MISLED.values(), ids=MISLED)
def test_damage_is_noticed_whatever_the_numbers(monkeypatch, misled):
    """A scale off by 1%, a key off by one, a tile too few: outside of what the contract allows to a kernel."""
    mislead_op(monkeypatch, *misled)
    for seed in range(5):
        with pytest.raises(AssertionError):
            check_op(OP_OF[misled[0]], "cpu", seed)


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
