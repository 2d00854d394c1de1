"""Merge entries of other receipts, for example from runs on other machines, into the receipt (tests/gpu/receipt.py).

usage: python -m tests.gpu.merge RECEIPT...

A valid entry of another receipt replaces the receipt's entry of the same name and arch, unless the receipt's entry is
valid and not older. The command prints which entries it takes, and which it leaves out because they failed, are
unfinished, stale or not newer. Afterwards `python -m tests.generate` and `python -m tests.gpu.pictures` write the pages
and pictures that depend on the receipt.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.gpu import receipt


def why_not(name: str, arch: str, entry: receipt.Entry) -> str | None:
    if name not in receipt.tested():
        return "there is no such entry here"
    if entry.get("failed"):
        return f"{entry['failed']} failed"
    if receipt.test_files(name) and not entry.get("tests"):
        return "it has no tests"
    if receipt.has_figures(name) and not entry.get("bench"):
        return "it has no figures"
    return receipt.why_stale(entry, name, arch, receipt.now().date())


def merge(others: Iterable[receipt.Entries]) -> tuple[list[str], dict[str, str]]:
    """-> (labels "ENTRY of ARCH" of the entries that were taken, {label: reason} of the entries that were left out)"""
    taken, left = [], {}
    with receipt.changing() as data:
        for arch, name, entry in ((a, n, e) for entries in others for a in entries for n, e in entries[a].items()):
            label, there = f"{name} of {arch}", data.get(arch, {}).get(name)
            if reason := why_not(name, arch, entry):
                left[label] = reason
            elif there and not why_not(name, arch, there) and there["date"] >= entry["date"]:
                left[label] = f"there is one of {there['date']}"
            else:
                data.setdefault(arch, {})[name] = entry
                taken.append(label)
    return list(dict.fromkeys(taken)), {label: why for label, why in left.items() if label not in taken}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.merge", description=__doc__.splitlines()[0])
    parser.add_argument("receipts", nargs="+", type=Path, metavar="RECEIPT")
    args = parser.parse_args(arguments)
    others = []
    for path in args.receipts:
        try:
            others.append(receipt.read(path))
        except ValueError as error:
            parser.error(f"RECEIPT: {error}")
    taken, left = merge(others)
    print("\n".join([*(f"{label}: taken" for label in taken), *(f"{label}: {why}" for label, why in left.items())]))
    return 0 if taken else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
