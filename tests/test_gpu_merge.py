"""Merging receipts (tests/gpu/merge.py): per arch and name, the result has the newest valid entry. Entries that are not
valid for today's code are printed and left out."""

import json
import subprocess
import sys

import pytest

from tests.gpu import merge, receipt

ARCH, NAME = "sm_90", "topk_indices"


def entry(name=NAME, **changes):
    ran = {"commit": "0123456789ab", "date": "2026-11-28", "tests": 3, "failed": 0, "unverified": None}
    return ran | receipt.digests(name, ARCH) | {"bench": [{"shape": "1 x 1"}], "device": "1 x GPU"} | changes


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr(receipt, "PATH", tmp_path / "receipt.json")
    return receipt.load


def call(tmp_path, *receipts):
    paths = [tmp_path / f"{i}.json" for i in range(len(receipts))]
    for path, data in zip(paths, receipts):
        path.write_text(json.dumps(data))
    return merge.main([*map(str, paths)])


def test_rows_of_two_machines_are_joined(tmp_path, written, capsys):
    receipt.save({ARCH: {"rms_norm": entry("rms_norm")}})
    assert call(tmp_path, {ARCH: {NAME: entry()}}, {ARCH: {"rotary": entry("rotary")}}) == 0
    assert written() == {ARCH: {name: entry(name) for name in ("rms_norm", "rotary", NAME)}}
    assert capsys.readouterr().out == f"{NAME} of {ARCH}: taken\nrotary of {ARCH}: taken\n"


def test_of_two_rows_the_newer_one_is_taken(tmp_path, written, capsys):
    newer, older, failed = entry(date="2026-11-29"), entry(), entry(date="2026-11-30", failed=1)
    assert call(tmp_path, {ARCH: {NAME: newer}}, {ARCH: {NAME: older}}, {ARCH: {NAME: failed}}) == 0
    assert written() == {ARCH: {NAME: newer}}
    assert call(tmp_path, {ARCH: {NAME: older}}) == 1
    assert f"{NAME} of {ARCH}: there is one of 2026-11-29" in capsys.readouterr().out


def test_of_two_rows_of_one_day_the_one_that_is_there_stays(tmp_path, written):
    receipt.save({ARCH: {NAME: entry()}})
    assert call(tmp_path, {ARCH: {NAME: entry(device="another GPU")}}) == 1
    assert written() == {ARCH: {NAME: entry()}}


def test_a_row_replaces_one_that_is_no_evidence(tmp_path, written):
    receipt.save({ARCH: {NAME: entry(date="2026-11-29", failed=1)}})
    assert call(tmp_path, {ARCH: {NAME: entry()}}) == 0
    assert written() == {ARCH: {NAME: entry()}}


def test_wholes_older_than_30_days_are_left_out(tmp_path, written, capsys):
    assert call(tmp_path, {ARCH: {"fuzz": entry("fuzz", date="2026-01-01")}}) == 1
    assert capsys.readouterr().out == f"fuzz of {ARCH}: it ran more than 30 days ago\n"


def test_rows_without_digests_are_left_out(tmp_path, written, capsys):
    old = {key: value for key, value in entry().items() if key not in ("kernels", "launches")}
    assert call(tmp_path, {ARCH: {NAME: old, "rms_norm": {}}}) == 1
    said = capsys.readouterr().out
    assert said == f"{NAME} of {ARCH}: it does not say on which kernels it ran\nrms_norm of {ARCH}: it has no tests\n"


SAVES = """
import sys
from pathlib import Path
from tests.gpu import receipt, run
receipt.PATH = Path(sys.argv[1])
for i in range(20):
    run.save_entry("sm_90", f"{sys.argv[2]}{i}", {})
"""


@pytest.mark.slow
def test_two_runs_at_once_lose_no_row(tmp_path, written):
    command = [sys.executable, "-c", SAVES, str(receipt.PATH)]
    for process in [subprocess.Popen([*command, name]) for name in "ab"]:
        assert process.wait() == 0
    assert written()[ARCH].keys() == {f"{name}{i}" for name in "ab" for i in range(20)}
    assert list(tmp_path.iterdir()) == [receipt.PATH]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kernels": "another"}, "the machine code of its kernels has changed"),
        ({"launches": "another"}, "its launches have changed"),
        ({"failed": 2}, "2 failed"),
        ({"unverified": "cut off"}, "cut off"),
        ({"tests": 0}, "it has no tests"),
        ({"bench": []}, "it has no figures"),
    ],
)
def test_rows_that_are_no_evidence_are_named(changes, reason, tmp_path, written, capsys):
    assert call(tmp_path, {ARCH: {NAME: entry(**changes), "gone": entry()}}) == 1
    assert not written().get(ARCH)
    assert capsys.readouterr().out == f"{NAME} of {ARCH}: {reason}\ngone of {ARCH}: there is no such entry here\n"


@pytest.mark.parametrize("content", [None, "", "[]", '{"sm_90": []}', '{"sm_90": {"rms_norm": 1}}', '{"sm_90": {'])
def test_a_file_that_is_no_receipt_is_refused(content, tmp_path, capsys):
    path = tmp_path / "receipt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        merge.main([str(path)])
    assert f"{path} must be a receipt, got: " in capsys.readouterr().err
