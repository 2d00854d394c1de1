"""Markdown tables from rows of data."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
# A column is a format string with the row's fields ("{ms:.2f}", "{parts[top-k]:.3f}"), or a function row -> text.
Column = str | Callable[[Row], str]


def table(rows: Sequence[Row], columns: Mapping[str, Column]) -> str:
    """Return a Markdown table with a line per row. columns: {heading: column}"""
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines = (" | ".join(cell(row, column) for column in columns.values()) for row in rows)
    return "\n".join([*head, *(f"| {line} |" for line in lines)])


def cell(row: Row, column: Column) -> str:
    """Return the cell's text. It is empty if a format string names a field that the row lacks or that is None."""
    if callable(column):
        return column(row)
    try:
        return column.format_map(row)
    except (KeyError, TypeError):
        return ""


def inserted(text: str, name: str, body: str) -> str:
    """Return the text with `body` in place of the lines between `<!-- table NAME -->` and `<!-- end of NAME -->`."""
    begin, end = f"<!-- table {name} -->", f"<!-- end of {name} -->"
    pattern = re.escape(begin) + ".*?" + re.escape(end)
    return re.sub(pattern, lambda _: f"{begin}\n\n{body}\n\n{end}", text, flags=re.S)


def names(text: str) -> list[str]:
    return re.findall(r"^<!-- table ([\w.]+) -->$", text, re.M)
