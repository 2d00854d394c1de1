"""The commands that write tables into documents: what they write, and one line for wrong calls and files."""

import json
import runpy
import sys

import pytest

from dsa_bench.e2e import latency_document, marked_document
from tests.bench.documents import DOCUMENTS, ENTRIES, files
from tests.bench.test_latency import ROW

MODULES = {name: module.__name__ for name, module in DOCUMENTS.items()} | {"latency": latency_document.__name__}
NOT_RUN = {"unverified": "has not run", "bench": []}


@pytest.fixture
def called(monkeypatch, capsys):
    """Runs `python -m MODULE ARGUMENTS...` in this process; its exit code, and its last line on the standard error."""

    def call(name, *arguments):
        monkeypatch.setattr(sys, "argv", [MODULES[name], *map(str, arguments)])
        monkeypatch.delitem(sys.modules, MODULES[name], raising=False)  # runpy warns of what is there
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(MODULES[name], run_name="__main__")
        captured = capsys.readouterr()
        assert captured.out == "" and "Traceback" not in captured.err
        return ended.value.code, (captured.err.splitlines() or [""])[-1]

    return call


def refused(name, problem):
    return 2, f"python -m {MODULES[name]}: error: {problem}"


@pytest.fixture
def measured(tmp_path):
    """Call it with a command's name: a file that it reads, and what is given behind the document."""

    def make(name):
        if name != "latency":
            return files(tmp_path, {ENTRIES[name]: NOT_RUN}, "")[0], []
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(ROW))
        return path, ["abc"]

    return make


@pytest.mark.parametrize("name", MODULES)
def test_missing_arguments_and_files(name, called, measured, tmp_path):
    names = "ROWS, DOCUMENT, COMMIT" if name == "latency" else "RECEIPT, DOCUMENT"
    assert called(name) == refused(name, f"the following arguments are required: {names}")
    there, rest = measured(name)
    missing = tmp_path / "missing"
    expected = refused(name, f"{missing}: No such file or directory")
    assert called(name, missing, tmp_path / "doc.md", *rest) == expected
    assert called(name, there, missing, *rest) == expected


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize(
    ("text", "arch", "problem"),
    [
        ("{", [], "must be JSON, got {}: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", [], "must have the entries of each arch, got {} with something else"),
        ('{"sm_90": []}', [], "must have the entries of each arch, got {} with something else"),
        ('{"sm_90": {"rotary": {}}}', [], "must have an entry ENTRY, got {} without one"),
        ('{"sm_90": {}}', ["sm_90"], "must have an entry ENTRY, got {} without one"),
    ],
)
def test_what_is_no_receipt_is_refused(name, called, tmp_path, text, arch, problem):
    receipt, doc = files(tmp_path, {}, "as it was")
    receipt.write_text(text)
    expected = "receipt: " + problem.replace("ENTRY", ENTRIES[name]).format(receipt)
    assert called(name, receipt, doc, *arch) == refused(name, expected)
    assert doc.read_text() == "as it was"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_is_written(name, called, tmp_path):
    module = DOCUMENTS[name]
    receipt, doc = files(tmp_path, {ENTRIES[name]: NOT_RUN}, "no marks")
    problem = f"document: must have the lines '{module.BEGIN}' and '{module.END}', in this order"
    assert called(name, receipt, doc) == refused(name, problem)
    doc.write_text(f"{module.BEGIN}{module.END}")
    wrong = f"arch: must be one of sm_90, which have an entry {ENTRIES[name]}, got sm_1"
    assert called(name, receipt, doc, "sm_1") == refused(name, wrong)
    assert called(name, receipt, doc, "sm_90") == (0, "")
    assert "has not run" in doc.read_text()


@pytest.mark.parametrize("error", [OSError("disk is full"), RuntimeError("the picture needs matplotlib")])
def test_what_else_may_fail(error, capsys):
    def write(*files):
        raise error

    with pytest.raises(SystemExit):
        marked_document.command("some.module", "About.", write, ["receipt", "document"])
    assert capsys.readouterr().err.endswith(f"python -m some.module: error: {error}\n")


def test_the_latency_table_is_written(called, tmp_path):
    rows, doc = tmp_path / "rows.jsonl", tmp_path / "doc.md"
    doc.write_text(f"{latency_document.BEGIN}{latency_document.END}")
    short = {name: value for name, value in ROW.items() if name != "ms"}
    begin = "rows: must be lines of JSON as latency prints them, got"
    for text, problem in [
        ("\n", f"none in {rows}"),
        (f"{json.dumps(ROW)}\nV3.2: drawn\n", f"line 2 of {rows}: Expecting value: line 1 column 1 (char 0)"),
        ("[]", f"line 1 of {rows} without all of {', '.join(latency_document.NEEDED)}"),
        (f"\n{json.dumps(short)}", f"line 2 of {rows} without all of {', '.join(latency_document.NEEDED)}"),
    ]:
        rows.write_text(text)
        assert called("latency", rows, doc, "abc") == refused("latency", f"{begin} {problem}")
    rows.write_text(json.dumps(ROW))
    assert called("latency", rows, doc, "abc") == (0, "") and "of commit abc." in doc.read_text()
