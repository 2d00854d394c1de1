"""The README's status table, generated from the GPU receipt.

usage: python -m tests.gpu.status_table
"""

import importlib
from typing import Any

import dsa
from tests.gpu import receipt

README = receipt.HERE.parent.parent / "README.md"
BEGIN, END = "<!-- status table: python -m tests.gpu.status_table -->", "<!-- end of status table -->"
# Helpers of the ops rather than ops.
NOT_OPS = {"backend", "make_v4_cache", "mqa_logits", "num_sms", "use_backend"}


def table(data: dict[str, Any]) -> str:
    """A row for each module of dsa.ops, with the public functions that it has, and for each part of one."""
    modules = [p.stem for p in (receipt.HERE.parent.parent / "dsa" / "ops").glob("[!_]*.py") if _functions(p.stem)]
    lines = [
        "| op | on Hopper | GPU tests | figure | time of the best peer, all shapes |",
        "|---|---|---|---|---|",
    ]
    names = sorted({*modules, *data["ops"]})
    return "\n".join([*lines, *(_row(name, data["ops"].get(name)) for name in names)])


def _functions(name: str) -> str:
    if name == receipt.GENERATION:
        return "generation: `dsa_layers.Generator`"
    module = importlib.import_module(receipt.op_module(name))
    there = {f: getattr(dsa, f) for f in dsa.__all__ if f not in NOT_OPS and hasattr(module, f)}
    # Not what an op takes from another one's module.
    public = [f for f, x in there.items() if x.__module__ == module.__name__ or not x.__module__.startswith("dsa.ops.")]
    part = name.removeprefix(receipt.op_module(name).rpartition(".")[2]).strip("_")
    return ", ".join(f"`{f}`" for f in public) + (f" ({part})" if part else "")


def _row(name: str, entry: dict[str, Any] | None) -> str:
    if entry is None:
        return f"| {_functions(name)} | PyTorch reference | | | |"
    if entry["unverified"]:
        return f"| {_functions(name)} | kernel, unverified: {entry['unverified']} | | | |"
    ratios = [row["ratio"] for row in entry["bench"] if row["ratio"] is not None]
    rows = entry["bench"]  # a benchmark lists its most telling shape first
    figures = f"{rows[0]['figure']} ({rows[0]['shape']})" if rows else ""
    names = ", ".join(sorted({row["peer"] for row in rows if row["peer"]}))
    peers = f"{names}: {min(ratios):.2f} to {max(ratios):.2f} times ours" if ratios else ""
    what = "ops' kernels" if name == receipt.GENERATION else "kernel"
    tests = f"{entry['tests'] - entry['failed']} of {entry['tests']}"
    return f"| {_functions(name)} | {what} | {tests} | {figures} | {peers} |"


def inserted(text: str) -> str:
    """The README's text with the table of today's receipt."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    data = receipt.load()
    note = f"Measured on one {data['device']}, torch {data['torch']}, CuTe DSL {data['dsl']}, {data['date']}."
    return f"{before}{BEGIN}\n{table(data)}\n\n{note}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(inserted(README.read_text()))
