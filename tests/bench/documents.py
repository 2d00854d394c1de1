"""The documents whose tables a receipt's entry has, and what all of them do."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

from dsa_bench.e2e import accuracy_document, document, drafts_document, million_document, parallel_document

DOCUMENTS = {
    "change-the-indexer": accuracy_document,
    "drafter": drafts_document,
    "e2e": document,
    "million": million_document,
    "parallel": parallel_document,
}
ENTRIES = {name: name for name in DOCUMENTS} | {"change-the-indexer": "accuracy", "drafter": "drafts"}
PLACE = {"device": "1 x H100", "date": "2026-11-26", "commit": "abc", "torch": "2.11", "dsl": "4.8"}
MEASURED = "Measured on 1 x H100, torch 2.11, CuTe DSL 4.8, on 2026-11-26, of commit abc."


def files(folder: Path, entries: dict[str, Any], text: str) -> tuple[Path, Path]:
    """A receipt of sm_90 with these entries, and a document."""
    receipt, doc = folder / "receipt.json", folder / "doc.md"
    receipt.write_text(json.dumps({"sm_90": entries}))
    doc.write_text(text)
    return receipt, doc


def written(name: str, rows: list[dict[str, Any]], folder: Path) -> list[str]:
    """The lines of a document into which the tables of these rows are written, twice, between its marks."""
    module: ModuleType = DOCUMENTS[name]
    text = f"Before.\n{module.BEGIN}\nold\n{module.END}\nAfter.\n"
    receipt, doc = files(folder, {ENTRIES[name]: PLACE | {"bench": rows}}, text)
    module.main(receipt, doc)
    lines = doc.read_text().splitlines()
    assert lines[:2] == ["Before.", module.BEGIN] and lines[-2:] == [module.END, "After."] and "old" not in lines
    if hasattr(module, "PICTURE"):
        assert (folder / module.PICTURE).read_bytes().startswith(b"\x89PNG")
    module.main(receipt, doc)
    assert doc.read_text().splitlines() == lines
    return lines
