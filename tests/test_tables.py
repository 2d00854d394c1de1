"""Tests of the Markdown tables of measured rows."""

import pytest

from tests.gpu import markdown, tables
from tests.gpu.receipt_rows import main_entries

PARTS = {"indexer": 0.5, "top-k": 0.25, "attention": 2.0, "MoE": 4.0, "rest": 0.25}


def test_a_missing_field_is_an_empty_cell():
    columns = {"run": "{run}", "ms": "{ms:.1f}", "top-k": "{parts[top-k]:.2f}", "twice": lambda row: str(2 * row["n"])}
    rows = [{"run": "a", "ms": 1.25, "parts": PARTS, "n": 1}, {"run": "b", "ms": None, "n": 2}]
    assert markdown.table(rows, columns).splitlines() == [
        "| run | ms | top-k | twice |",
        "|---|---|---|---|",
        "| a | 1.2 | 0.25 | 2 |",
        "| b |  |  | 4 |",
    ]


def test_a_table_takes_the_place_of_the_one_before():
    text = "Before.\n<!-- table a.b -->\nold\n<!-- end of a.b -->\nAfter."
    new = markdown.inserted(text, "a.b", r"\1 new")
    assert new == "Before.\n<!-- table a.b -->\n\n\\1 new\n\n<!-- end of a.b -->\nAfter."
    assert markdown.inserted(new, "a.b", r"\1 new") == new and markdown.names(new) == ["a.b"]
    with pytest.raises(KeyError, match=r"a\.b"):
        tables.inserted(text)


def test_an_entry_that_never_ran_says_so(monkeypatch):
    monkeypatch.setattr(tables, "main_entries", lambda: {"e2e": {"unverified": "has not run"}})
    assert tables.TABLES["e2e"]() == "Not measured on this code: has not run."
    assert tables.TABLES["drafts"]() == "Not measured on this code: no entry."
    place = {"device": "a GPU", "torch": "2", "dsl": "4", "date": "2026-11-28", "commit": "abc"}
    found = tables.place(place | {"unverified": "changed"})
    assert found.startswith("Measured on a GPU, torch 2, CuTe DSL 4, on 2026-11-28, commit abc. ")
    assert found.endswith(" Not yet repeated on today's code: changed.")


def test_speed_ups_of_a_pass_are_the_peers_time_over_ours():
    row = {"ratio": 1.25, "ms": 8.0, "parts": PARTS | {"indexer": 0.0}, "peer_ms": 10.0}
    row["peer_parts"] = PARTS | {"top-k": 1.0, "glue": 0.8}
    cells = {name: markdown.cell(row, column) for name, column in tables.E2E.items()}
    assert (cells["speed-up"], cells["without glue"]) == ("1.25", "1.15")
    assert (cells["indexer: speed-up"], cells["top-k: speed-up"]) == ("", "4.00")
    alone = row | {"ratio": None}
    assert markdown.cell(alone, tables.E2E["without glue"]) == markdown.cell(alone, tables.E2E["top-k: speed-up"]) == ""


def test_passes_of_one_shape_share_a_line():
    yardstick = {"yardsticks": {"FA2": {"ms": 0.5}}}
    rows = [{"shape": "forward, a, b", "ms": 1.0} | yardstick, {"shape": "backward, a, b", "ms": 3.0}]
    (row,) = tables._joined(rows)
    cells = [markdown.cell(row, column) for column in tables.LOSS.values()]
    assert cells == ["a, b", "1.00", "2.00", "3.00", ""]


@pytest.mark.parametrize("name", sorted(main_entries().keys() & tables.TABLES.keys()))
def test_no_column_is_empty_in_every_row(name):
    """An empty column can mean that the benchmark's rows have another name for its field."""
    lines = [line.split(" | ") for line in tables.TABLES[name]().splitlines() if line.startswith("| ")]
    widths = {len(line) for line in lines}
    assert len(widths) == 1 and len(lines) > 1
    assert all(any(line[i].strip(" |") for line in lines[1:]) for i in range(widths.pop()))
