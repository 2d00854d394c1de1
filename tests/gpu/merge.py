"""Take entries that have run on other machines, or in other copies of this tree, into the receipt.

usage: python -m tests.gpu.merge COMMIT RECEIPT...

RECEIPT is a receipt.json that `python -m tests.gpu.run --commit COMMIT` has written there. Taken are its entries of
this commit that are of the code here, without failures and with all that they are to have; of two RECEIPTs that have
one the later one's. The others are named, with the reason. Then `python -m tests.generate` and
`python -m tests.gpu.headlines` write what follows from the receipt.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.gpu import receipt, run
from tests.gpu.read_once import read_once

Entry = dict[str, Any]


def why_not(name: str, arch: str, entry: Entry) -> str | None:
    """Why an entry that has run elsewhere is not one of the receipt here; None: it is."""
    if name not in receipt.tested():
        return "there is no such entry here"
    if entry["digest"] != receipt.digest(name, arch):
        return "it is of other code or tests"
    if entry["failed"]:
        return f"{entry['failed']} failed"
    if entry["unverified"]:
        return entry["unverified"]
    if receipt.test_files(name) and not entry["tests"]:
        return "it has no tests"
    if receipt.has_figures(name) and not entry["bench"]:
        return "it has no figures"
    return None


def merge(commit: str, there: Iterable[receipt.Entries]) -> tuple[list[str], dict[str, str]]:
    """Writes the receipt. -> (the entries that it got, as "ENTRY of ARCH"; those of the commit that it did not, why)"""
    data, taken, left = receipt.load(), [], {}
    with read_once():
        for arch, name, entry in ((a, n, e) for entries in there for a in entries for n, e in entries[a].items()):
            label = f"{name} of {arch}"
            if entry.get("commit") != commit:
                continue
            if reason := why_not(name, arch, entry):
                left[label] = reason
                continue
            data.setdefault(arch, {})[name] = entry
            taken = [*(other for other in taken if other != label), label]
    receipt.save(data)
    return taken, {label: reason for label, reason in left.items() if label not in taken}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.merge", description=__doc__.splitlines()[0])
    parser.add_argument("commit", metavar="COMMIT", help="as `python -m tests.gpu.run --commit` was told it")
    parser.add_argument("receipts", nargs="+", type=Path, metavar="RECEIPT")
    args = parser.parse_args(arguments)
    if not re.fullmatch(run.COMMIT, args.commit):
        parser.error(f"COMMIT: must be at least 12 digits of its hash, got {args.commit!r}")
    there = []
    for path in args.receipts:
        try:
            there.append(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            parser.error(f"RECEIPT: {path} must be a receipt, got: {error}")
    taken, left = merge(args.commit, there)
    print("\n".join([*(f"{label}: taken" for label in taken), *(f"{label}: {why}" for label, why in left.items())]))
    if not taken:
        print(f"nothing is taken: no entry of {args.commit} is one of this code")
    return 0 if taken else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
