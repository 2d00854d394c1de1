"""What the benchmarks of several rows have in common: calls that their commands refuse, a line a row, and documents."""

import json
from pathlib import Path

import pytest

from dsa_bench.e2e import drafts, latency_document, million, parallel
from tests.bench.documents import DOCUMENTS, ENTRIES, MEASURED, PLACE, files

DOCS = Path(__file__).parents[2] / "docs"
RECEIPT = Path(__file__).parents[1] / "gpu" / "receipt.json"
ROWS = [{"shape": "a"}, {"shape": "b", "ms": 1.5}]
NOT_RUN = {"unverified": "has not run on a GPU"}


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (
            drafts,
            ["--sequences", "4", "6"],
            "--sequences: must be powers of two, which generation fills them up to, got 6",
        ),
        (million, ["--tokens", "100000"], "--tokens: must be multiples of 8192, at least 16384, got 100000"),
        (parallel, ["--gpus", "1"], "--gpus: must be at least 2, got 1"),
        (parallel, ["--models", "V5"], "argument --models: invalid choice: 'V5'"),
        (parallel, ["--runs", "prefill 5"], "argument --runs: invalid choice: 'prefill 5'"),
        *((command, [], "a benchmark needs a GPU with kernels: no GPU") for command in (drafts, million, parallel)),
    ],
)
def test_wrong_calls(command, arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("dsa.backends.why_no_kernels", lambda: "no GPU")
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "asked"),
    [
        (drafts, ["--sequences", "2"], ([2],)),
        (million, ["--tokens", "131072", "--sequences", "2"], ([131072], [2])),
    ],
)
def test_a_line_a_row(command, arguments, asked, capsys, monkeypatch):
    given = []
    monkeypatch.setattr("dsa.backends.why_no_kernels", lambda: None)
    monkeypatch.setattr(command, "compile_ahead", lambda asked, tell: tell("compiled"))
    monkeypatch.setattr(command, "rows", lambda *given_, tell: given.append(given_) or iter(ROWS))
    assert command.main(["--models", "V4-Flash", *arguments]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == ROWS and "compiled" in err
    assert given == [(["V4-Flash"], *asked)]
    assert command.main(["--compile"]) == 0 and len(given) == 1


@pytest.mark.parametrize(
    ("page", "module"), [*((f"{name}.md", module) for name, module in DOCUMENTS.items()), ("e2e.md", latency_document)]
)
def test_the_documents_marks_are_there(page, module):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text.count(module.BEGIN) == text.count(module.END) == 1


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_not_measured_is_said_to_be(name, tmp_path):
    module, entry = DOCUMENTS[name], ENTRIES[name]
    receipt, doc = files(tmp_path, {entry: NOT_RUN}, f"{module.BEGIN}{module.END}")
    module.main(receipt, doc)
    assert (
        f"{module.BEGIN}\n\nNothing is measured on this code: has not run on a GPU.\n\n{module.END}" in doc.read_text()
    )
    assert {path.name for path in tmp_path.iterdir()} == {receipt.name, doc.name}  # and no picture
    with pytest.raises(ValueError, match="entry: must have rows"):
        module.generated({"unverified": None, "bench": []})
    with pytest.raises(ValueError, match="text: must have the lines"):
        module.inserted("no marks", NOT_RUN)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_of_several_archs_the_documents_is_named(name, tmp_path):
    module, entry = DOCUMENTS[name], ENTRIES[name]
    receipt, doc = files(tmp_path, {}, f"{module.BEGIN}{module.END}")
    archs = {arch: {entry: {"unverified": f"{arch} has not run"}} for arch in ("sm_90", "sm_100")}
    receipt.write_text(json.dumps(archs | {"sm_120": {}}))
    module.main(receipt, doc, "sm_100")
    assert "sm_100 has not run" in doc.read_text()
    for arch in (None, "sm_120"):
        with pytest.raises(ValueError, match=f"arch: must be one of sm_90, sm_100, .* got {arch}"):
            module.main(receipt, doc, arch)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_rows_of_earlier_code_stay(name):
    """And the document says so, in the line that has their commit."""
    rows = json.loads(RECEIPT.read_text(encoding="utf-8"))["sm_90"][ENTRIES[name]]["bench"]
    entry = PLACE | {"bench": rows}
    now, earlier = (DOCUMENTS[name].generated(entry | {"unverified": why}) for why in (None, "changed since"))
    assert earlier == now.replace(MEASURED, f"{MEASURED} Today's code is unverified: changed since.", 1) != now
