"""The README's status table, generated from the GPU receipt.

usage: python -m tests.gpu.status_table
"""

import importlib
from typing import Any

import dsa
from dsa.source_digest import functions_with_kernels, op_modules
from tests.gpu import receipt

README = receipt.ROOT / "README.md"
BEGIN, END = "<!-- status table: python -m tests.gpu.status_table -->", "<!-- end of status table -->"
# Helpers of the ops rather than ops.
NOT_OPS = {"FlashMLASchedMeta", "backend", "make_v4_cache", "num_sms", "use_backend"}
HEAD = """\
| op | on Hopper | tests on a GPU | figure | speed-up over the best peer | over plain PyTorch | run |
|---|---|---|---|---|---|---|"""


def table(data: dict[str, Any]) -> str:
    """A row for each module of dsa.ops, with the public functions that it has, for each part of one, and for each
    entry of more than one op."""
    modules = [op for op in op_modules() if public_functions(op)]
    names = sorted({*modules, *data["entries"]} - receipt.WHOLES.keys()) + list(receipt.WHOLES)
    return "\n".join([HEAD, *(_row(name, data["entries"].get(name)) for name in names)])


def public_functions(name: str) -> list[str]:
    """The functions of dsa that an op's module defines."""
    module = importlib.import_module(receipt.op_module(name))
    there = {f: getattr(dsa, f) for f in dsa.__all__ if f not in NOT_OPS and hasattr(module, f)}
    # Not what an op takes from another one's module.
    return [f for f, x in there.items() if x.__module__ == module.__name__ or not x.__module__.startswith("dsa.ops.")]


def _row(name: str, entry: dict[str, Any] | None) -> str:
    if entry is None:
        return f"| {_label(name)} | {_implementations(name)} | none | | | | |"
    if entry["unverified"]:
        return f"| {_label(name)} | {_implementations(name)} | unverified: {entry['unverified']} | | | | |"
    rows = entry["bench"]
    figure = f"{rows[0]['figure']} ({rows[0]['shape']})" if rows and "figure" in rows[0] else ""
    tests = f"{entry['tests'] - entry['failed']} of {entry['tests']}" if entry["tests"] else ""
    if entry["skipped"]:
        tests += f", {entry['skipped']} skipped"
    run = f"{entry['date']}, {entry['commit'][:9]}"
    speed_ups = _speed_up(rows, "peer", "ratio"), _speed_up(rows, "baseline", "baseline_ratio")
    return f"| {' | '.join((_label(name), _implementations(name), tests, figure, *speed_ups, run))} |"


def _label(name: str) -> str:
    if name in receipt.WHOLES:
        return receipt.WHOLES[name]
    part = name.removeprefix(receipt.op_module(name).rpartition(".")[2]).strip("_")
    return ", ".join(f"`{f}`" for f in public_functions(name)) + (f" ({part})" if part else "")


def _implementations(name: str) -> str:
    """Kernel or PyTorch, by function where a module has both."""
    if name in receipt.WHOLES:
        return ""
    public, with_kernel = public_functions(name), functions_with_kernels(receipt.op_module(name))
    plain = [f"`{f}`" for f in public if f not in with_kernel]
    if len(plain) == len(public):
        return "PyTorch"
    return "kernel" + (f"; PyTorch: {', '.join(plain)}" if plain else "")


def _speed_up(rows: list[dict[str, Any]], name: str, ratio: str) -> str:
    """The range over all shapes of how many times as fast ours is as the best of the others."""
    ratios = [row[ratio] for row in rows if row.get(ratio) is not None]
    if not ratios:
        return ""
    names = ", ".join(sorted({row[name] for row in rows if row.get(name)}))
    return f"{min(ratios):.2f} to {max(ratios):.2f} ({names})"


def inserted(text: str) -> str:
    """The README's text with the table of today's receipt."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    data = receipt.load()
    verified = [entry for entry in data["entries"].values() if not entry["unverified"]]
    places = sorted({f"{e['device']}, torch {e['torch']}, CuTe DSL {e['dsl']}" for e in verified})
    note = f"Measured on {'; '.join(places)}. " if places else ""
    note += "A speed-up is the other's time over ours in the same run, over all shapes; the best of all peers counts."
    return f"{before}{BEGIN}\n{table(data)}\n\n{note}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(inserted(README.read_text()))
