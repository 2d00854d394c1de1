"""Generate the text of docs/reference/status.md, with a table per arch, from the GPU receipt (tests/gpu/receipt.py)."""

import datetime
import re
from collections.abc import Mapping
from typing import Any

from dsa.ops import op_modules
from dsa.runtime.backends import ARCH_NAMES, ARCHS, archs
from tests.gpu import receipt
from tests.gpu.receipt_rows import compared, names_of, shape_of
from tests.public_names import ops_of

PATH = receipt.ROOT / "docs" / "reference" / "status.md"
AS_OF = r"As of (\d{4}-\d\d-\d\d)"
HEAD = """\
| entry: functions | runs | tests on a GPU | figure | speed-up over the best peer | over plain PyTorch | run |
|---|---|---|---|---|---|---|"""


def table(arch: str, entries: Mapping[str, dict[str, Any]]) -> str:
    """Return an arch's table with a row for each op module, each entry about a part of an op, and the entries of
    WHOLES."""
    modules = [op for op in op_modules() if ops_of(op_modules()[op])]
    asked = {*entries, *receipt.asked(arch)}
    wholes = [name for name in receipt.WHOLES if name in asked]
    names = sorted({*modules, *entries} - receipt.WHOLES.keys()) + wholes
    return "\n".join([HEAD, *(_row(name, arch, entries.get(name)) for name in names)])


def _row(name: str, arch: str, entry: dict[str, Any] | None) -> str:
    what = f"| {_label(name)} | {_implementations(name, arch)}"
    if entry is None:
        return f"{what} | not run | | | | |"
    if entry["unverified"] and not entry.get("bench"):
        return f"{what} | unverified: {entry['unverified']} | | | | |"
    rows = entry["bench"]
    figure = f"{rows[0]['figure']} ({shape_of(name, rows[0])})" if rows and "figure" in rows[0] else ""
    tests = f"{entry['tests'] - entry['failed']} of {entry['tests']}" if entry["tests"] else ""
    if entry["skipped"]:
        tests += f", {entry['skipped']} skipped"
    run = f"{entry['date']}, {entry['commit'][:9]}"
    if entry["unverified"]:  # the figures are those of the code on which the entry ran
        tests, run = f"unverified: {entry['unverified']}", f"before: {run}"
    speed_ups = (
        _speed_up(compared(rows), "peer", "ratio"),
        _speed_up(rows, "baseline", "baseline_ratio"),
    )
    return f"{what} | {' | '.join((tests, figure, *speed_ups, run))} |"


def _label(name: str) -> str:
    if name in receipt.WHOLES:
        return receipt.WHOLES[name].label
    public = ops_of(receipt.op_module(name))
    return f"`{name}`" + ("" if public == [name] else f": {', '.join(f'`{f}`' for f in public)}")


def _implementations(name: str, arch: str) -> str:
    """Return "kernel", "PyTorch", or "kernel; PyTorch: " and the names of the functions without kernels. "" for an
    entry of WHOLES."""
    if name in receipt.WHOLES:
        return ""
    module = receipt.op_module(name)
    public = ops_of(module)
    plain = [f"`{f}`" for f in public if arch not in ARCHS.get(f, ())]
    if len(plain) == len(public):
        return "PyTorch"
    return "kernel" + (f"; PyTorch: {', '.join(plain)}" if plain else "")


def _speed_up(rows: list[dict[str, Any]], name: str, ratio: str) -> str:
    """Return the smallest and the largest number in the column `ratio`, followed by the names in the column `name`."""
    ratios = [row[ratio] for row in rows if row.get(ratio) is not None]
    if not ratios:
        return ""
    return f"{min(ratios):.2f} to {max(ratios):.2f} ({names_of(rows, name)})"


def tables() -> str:
    """The date that the page names decides whether entries are too old."""
    today = datetime.date.fromisoformat(re.search(AS_OF, PATH.read_text(encoding="utf-8"))[1])
    parts = []
    judged = receipt.judged(today)
    for arch in sorted({*archs(), *judged}):
        entries = judged.get(arch, {})
        measured = [entry for entry in entries.values() if "device" in entry]
        places = sorted({f"{e['device']}, torch {e['torch']}, CuTe DSL {e['dsl']}" for e in measured})
        where = f"Measured on {'; '.join(places)}." if places else "Nothing is measured."
        parts.append(f"## {arch} ({ARCH_NAMES.get(arch, '')})\n\n{table(arch, entries)}\n\n{where}")
    return "\n\n".join(parts)


def dated(text: str) -> str:
    return re.sub(AS_OF, f"As of {receipt.now().date()}", text)
