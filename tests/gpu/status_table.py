"""The README's status table, generated from the GPU receipt.

usage: python -m tests.gpu.status_table
"""

from typing import Any

import dsa
from tests.gpu import receipt

README = receipt.HERE.parent.parent / "README.md"
BEGIN, END = "<!-- status table: python -m tests.gpu.status_table -->", "<!-- end of status table -->"
# Helpers of the ops rather than ops.
NOT_OPS = {"backend", "num_sms", "use_backend", "get_mla_metadata", "get_paged_mqa_logits_metadata", "make_v4_cache"}


def table(data: dict[str, Any]) -> str:
    ops = sorted((set(dsa.__all__) - NOT_OPS) | set(data["ops"]))
    lines = [
        "| op | on Hopper | GPU tests | figure | time of the best peer, all shapes |",
        "|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_row(name, data["ops"].get(name)) for name in ops)])


def _row(name: str, entry: dict[str, Any] | None) -> str:
    if entry is None:
        return f"| `{name}` | PyTorch reference | | | |"
    if entry["unverified"]:
        return f"| `{name}` | kernel, unverified: {entry['unverified']} | | | |"
    ratios = [row["ratio"] for row in entry["bench"] if row["ratio"] is not None]
    rows = entry["bench"]  # a benchmark lists its most telling shape first
    figures = f"{rows[0]['figure']} ({rows[0]['shape']})" if rows else ""
    peers = f"{min(ratios):.2f} to {max(ratios):.2f} times ours" if ratios else ""
    return f"| `{name}` | kernel | {entry['tests'] - entry['failed']} of {entry['tests']} | {figures} | {peers} |"


def inserted(text: str) -> str:
    """The README's text with the table of today's receipt."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    data = receipt.load()
    note = f"Measured on one {data['device']}, torch {data['torch']}, CuTe DSL {data['dsl']}, {data['date']}."
    return f"{before}{BEGIN}\n{table(data)}\n\n{note}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(inserted(README.read_text()))
