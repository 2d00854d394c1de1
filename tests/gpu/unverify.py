"""Mark entries of the receipt as not run on a GPU, and say why.

usage: python -m tests.gpu.unverify REASON [ENTRY...]

After a change, on a machine without a GPU: every entry whose code or tests have changed since it ran, or since it said
why it has not, and every entry that is missing, such as a new op's, is "unverified" for that REASON; the status table
then shows it, beside the figures of the code that the entry ran on. With ENTRY only these. Entries that still are of
this code stay as they are. `python -m tests.gpu.run` on a GPU of the arch replaces the marks.
"""

import argparse
import sys
from collections.abc import Sequence

from dsa import backends
from tests.gpu import receipt
from tests.gpu.read_once import read_once


def unverify(reason: str, names: Sequence[str] = ()) -> list[str]:
    """Writes the marks into the receipt; which entries got one, as "ENTRY of ARCH"."""
    data, marked = receipt.load(), []
    with read_once():
        for arch in sorted({*backends.archs(), *data}):
            for name in receipt.needed(data, arch, names):
                entries, mark = data.setdefault(arch, {}), {"unverified": reason}
                mark["unverified_at"] = receipt.digest(name, arch)
                entries[name] = entries.get(name, {}) | mark
                marked.append(f"{name} of {arch}")
    receipt.save(data)
    return marked


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.unverify", description=__doc__.splitlines()[0])
    parser.add_argument("reason", metavar="REASON", help="a line that the status table shows")
    parser.add_argument("entries", nargs="*", default=[], metavar="ENTRY", help="default: all that need it")
    args = parser.parse_args(arguments)
    if not args.reason.strip() or set(args.reason) & {"\n", "|"}:
        parser.error(f"REASON: must be a line of text without |, for a table's cell, got {args.reason!r}")
    if unknown := set(args.entries) - set(receipt.tested()):
        parser.error(f"ENTRY: must be of {', '.join(receipt.tested())}, got {', '.join(sorted(unknown))}")
    marked = unverify(args.reason, args.entries)
    print("\n".join(marked) or "nothing is marked: the entries are of this code, or say already why they are not")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
