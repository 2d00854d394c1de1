"""A receipt is the union of rows; those that are no evidence for today's code are named and left out."""

import json

import pytest

from tests.gpu import merge, receipt

ARCH, NAME = "sm_90", "topk_indices"


def entry(name=NAME, **changes):
    ran = {"commit": "0123456789ab", "date": "2026-11-28", "tests": 3, "failed": 0, "unverified": None}
    return ran | receipt.digests(name, ARCH) | {"bench": [{"shape": "1 x 1"}], "device": "1 x GPU"} | changes


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A receipt without entries."""
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
    assert f"{NAME} of {ARCH}: there is a newer one, of 2026-11-29" in capsys.readouterr().out


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


def test_a_file_that_is_no_receipt_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        merge.main([str(tmp_path / "nothing")])
    assert "nothing must be a receipt, got: " in capsys.readouterr().err
