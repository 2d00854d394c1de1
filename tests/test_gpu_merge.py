"""Entries that have run elsewhere come into the receipt if they are of the code here, and else are named."""

import json

import pytest

from tests.gpu import merge, receipt

COMMIT, ARCH, NAME = "0123456789ab", "sm_90", "topk_indices"


def entry(**changes):
    ran = {"commit": COMMIT, "digest": receipt.digest(NAME, ARCH), "tests": 3, "failed": 0, "unverified": None}
    return ran | {"bench": [{"shape": "1 x 1"}], "device": "1 x GPU"} | changes


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A receipt without entries."""
    monkeypatch.setattr(receipt, "PATH", tmp_path / "receipt.json")
    return receipt.load


def call(tmp_path, *receipts):
    paths = [tmp_path / f"{i}.json" for i in range(len(receipts))]
    for path, data in zip(paths, receipts):
        path.write_text(json.dumps(data))
    return merge.main([COMMIT, *map(str, paths)])


def test_an_entry_of_this_code_is_taken(tmp_path, written, capsys):
    assert call(tmp_path, {ARCH: {NAME: entry()}}) == 0
    assert written() == {ARCH: {NAME: entry()}}
    assert capsys.readouterr().out == f"{NAME} of {ARCH}: taken\n"


def test_of_two_the_later_one_is_taken_and_one_that_is_none_does_not_count(tmp_path, written):
    later, failed = entry(device="1 x another"), entry(failed=1)
    assert call(tmp_path, {ARCH: {NAME: entry()}}, {ARCH: {NAME: later}}, {ARCH: {NAME: failed}}) == 0
    assert written() == {ARCH: {NAME: later}}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"digest": "of other code"}, "it is of other code or tests"),
        ({"failed": 2}, "2 failed"),
        ({"unverified": "cut off"}, "cut off"),
        ({"tests": 0}, "it has no tests"),
        ({"bench": []}, "it has no figures"),
    ],
)
def test_others_are_named(changes, reason, tmp_path, written, capsys):
    assert call(tmp_path, {ARCH: {NAME: entry(**changes)}}) == 1
    assert not written().get(ARCH)
    assert f"{NAME} of {ARCH}: {reason}\n" in capsys.readouterr().out


def test_a_time_on_the_host_has_figures(tmp_path, written, capsys):
    ran = entry(digest=receipt.digest("host", ARCH), tests=0)
    assert call(tmp_path, {ARCH: {"host": ran | {"bench": []}}}) == 1
    assert f"host of {ARCH}: it has no figures\n" in capsys.readouterr().out
    assert call(tmp_path, {ARCH: {"host": ran}}) == 0


def test_entries_of_other_commits_are_not_looked_at(tmp_path, written, capsys):
    assert call(tmp_path, {ARCH: {NAME: entry(commit="ba9876543210"), "no such": {"unverified": "waits"}}}) == 1
    assert capsys.readouterr().out.endswith(f"nothing is taken: no entry of {COMMIT} is one of this code\n")


def test_an_entry_that_is_no_more(tmp_path, written, capsys):
    assert call(tmp_path, {ARCH: {"gone": entry()}}) == 1
    assert "gone of sm_90: there is no such entry here" in capsys.readouterr().out


def test_wrong_calls(tmp_path, capsys):
    for arguments, message in (
        (["12345", "x"], "COMMIT: must be at least 12 digits of its hash, got '12345'"),
        ([COMMIT, str(tmp_path / "nothing")], "nothing must be a receipt, got: "),
    ):
        with pytest.raises(SystemExit, match="2"):
            merge.main(arguments)
        assert message in capsys.readouterr().err
