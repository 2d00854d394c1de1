"""`dsa check`: every self test passes, and each fails when its op is wrong."""

import errno
import importlib.metadata
import re
from pathlib import Path

import pytest
import torch

import dsa
from dsa.cases import cases_of, check_op
from dsa.ops import op_modules
from dsa.runtime import backends
from dsa_layers.command import health
from dsa_layers.command.main import main
from tests.layers.command.wrong_ops import GENERAL, MISLED, UNNOTICED, WRONG, break_op, mislead_op, swapped


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


def outcomes(report):
    """op -> what the report says of it."""
    return dict(re.findall(r"^  (\w+) +(?:kernel|reference) +[\d.]+ s  (.*)$", report, re.MULTILINE))


# Of these the first run's outcome is kept, for where no op that they call is a wrong one.
NOTICED = {what: wrong for what, wrong in {**GENERAL, **WRONG}.items() if what not in UNNOTICED}


def run(name):
    check_op(name, "cpu")


@pytest.mark.parametrize(("name", "function", "wrong"), NOTICED.values(), ids=NOTICED)
def test_a_wrong_op_is_found(monkeypatch, name, function, wrong):
    break_op(monkeypatch, function, wrong)
    with pytest.raises(AssertionError):
        run(name)


@pytest.mark.parametrize("what", UNNOTICED)
def test_what_is_not_noticed_is_listed_for_that_alone(monkeypatch, what):
    name, function, wrong = GENERAL[what]
    break_op(monkeypatch, function, wrong)
    run(name)


def test_every_check_is_shown_to_fail():
    assert {name for name, _, _ in NOTICED.values()} == op_modules().keys()
    assert not GENERAL.keys() & WRONG.keys()


@pytest.mark.parametrize(("name", "function", "argument", "change", "options"), MISLED.values(), ids=MISLED)
def test_damage_is_noticed_whatever_the_numbers(monkeypatch, name, function, argument, change, options):
    """A scale off by 1%, a key off by one, a tile too few: outside of what the contract allows to a kernel."""
    mislead_op(monkeypatch, function, argument, change, options)
    for seed in range(5):
        with pytest.raises(AssertionError):
            check_op(name, "cpu", seed)


def test_the_report(monkeypatch, capsys):
    monkeypatch.setattr(health, "_PACKAGES", ("torch", "no-such-package"))
    assert main(["check"]) == 0
    report = capsys.readouterr().out
    assert f"torch {importlib.metadata.version('torch')}\nno-such-package not installed\n" in report
    assert "GPU: none\nbackend: reference (no GPU for this test)\ncompile cache: " in report
    assert outcomes(report) == dict.fromkeys(op_modules(), "ok")
    assert report.endswith(f"{len(op_modules())} of {len(op_modules())} ops passed\n")


def test_ops_that_fail_are_named(monkeypatch, capsys):
    """An op that raises, or is wrong, does not hide the others."""

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


def test_every_seed_has_its_own_numbers(monkeypatch, capsys):
    """The op fails with the third set of numbers, and the report says so."""

    def check(name, device, seed):
        check_op(name, device, seed)
        assert seed != 2

    monkeypatch.setattr(health, "op_modules", lambda: ["topk_indices"])
    monkeypatch.setattr(health, "check_op", check)
    assert main(["check", "--seeds", "2"]) == 0
    assert main(["check", "--seeds", "4"]) == 1
    assert outcomes(capsys.readouterr().out)["topk_indices"].startswith("FAILED with seed 2: AssertionError")
    case, *_ = cases_of("topk_indices")
    assert len({case.arguments(seed=seed)["scores"][0, 0].item() for seed in range(3)}) == 3


def test_the_state_of_the_compile_cache(monkeypatch, tmp_path):
    for name, size in (("a.o", 1_200_000), ("b.o", 100_000), ("b.lock", 0)):
        (tmp_path / name).write_bytes(bytes(size))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    not_used = r"not used \(.*\): every process compiles again"
    for directory, state in [
        ("", r"off \(DSA_CACHE_DIR is empty\)"),
        (tmp_path / "new" / "cache", f"{tmp_path}/new/cache, 0 kernels, 0.0 MB"),
        (tmp_path, f"{tmp_path}, 2 kernels, 1.3 MB"),
        (shared, f"{shared}, 0 kernels, 0.0 MB, {not_used}"),
        (tmp_path / ("x" * 300), f".*, 0 kernels, 0.0 MB, {not_used.replace('.*', 'File name too long')}"),
        (tmp_path / "a.o" / "cache", ".*, 0 kernels, 0.0 MB, not writable: every process compiles again"),
    ]:
        monkeypatch.setenv("DSA_CACHE_DIR", str(directory))
        assert re.fullmatch(state, health._cache_state()), directory
    assert not (tmp_path / "new").exists()

    def exists(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", exists)  # the home of somebody else, of whom HOME speaks
    monkeypatch.setenv("DSA_CACHE_DIR", "/root/.cache/dsa")
    assert health._cache_state().endswith(", not used (Permission denied): every process compiles again")
