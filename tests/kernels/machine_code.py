"""Whether a change of the source has changed the kernels' machine code, whatever became of names and files.

usage: python -m tests.kernels.machine_code write FILE      before the change
       python -m tests.kernels.machine_code compare FILE    after it: 0 if every shipped variant is as it was
       python -m tests.kernels.machine_code compare FILE mla.sparse training    only of modules with such a word

A variant is as it was if its instructions, constants, registers and shared memory are: symbols, which are made of the
names in the source, do not count. One whose compile function or arguments have another name is found by its code.
"""

import argparse
import hashlib
import importlib
import json
import pkgutil
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import dsa.kernels

_NO_BYTES = 8  # a section's type: it has a size alone
_SIZED, _REGISTERS = 4, 0x2F  # of an attribute in .nv.info: with a size and as many bytes; (symbol, registers)
_KINDS = ".text.", ".nv.constant0.", ".nv.shared."


def digest(cubin: bytes) -> str:
    """Of all of its kernels' code, without the symbols."""
    parts = [f"{kind} {size} {hashlib.sha256(code).hexdigest()}" for kind, size, code in code_sections(cubin)]
    parts.append(f"registers {sorted(registers(cubin))}")
    return hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()[:16]


def code_sections(cubin: bytes) -> Iterator[tuple[str, int, bytes]]:
    """(one of _KINDS, its size, its content) of each section of a kernel's instructions, constants or shared memory."""
    for name, size, content in _sections(cubin):
        for kind in _KINDS:
            if name.startswith(kind):
                yield kind, size, content


def registers(cubin: bytes) -> Iterator[int]:
    """Of a thread of each kernel."""
    for name, _, content in _sections(cubin):
        at = 0
        while name == ".nv.info" and at < len(content):
            form, attribute, size = struct.unpack_from("<BBH", content, at)
            if (form, attribute) == (_SIZED, _REGISTERS):
                yield struct.unpack_from("<II", content, at + 4)[1]
            at += 4 + (size if form == _SIZED else 0)


def _sections(cubin: bytes) -> Iterator[tuple[str, int, bytes]]:
    """(name, size, content) of each section of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, names = struct.unpack_from("<HHH", cubin, 58)
    heads = [struct.unpack_from("<IIQQQQ", cubin, table + i * entry) for i in range(count)]
    for name, type_, _, _, offset, size in heads:
        start = heads[names][4] + name
        content = b"" if type_ == _NO_BYTES else cubin[offset : offset + size]
        yield cubin[start : cubin.index(b"\0", start)].decode(), size, content


def digests(words: Sequence[str] = ("",)) -> dict[str, str]:
    """Of every variant that the kernels ship, by compile function and arguments; words: of the modules whose names have
    one of them."""
    from dsa.cute.compile_cache import cubin

    found = {}
    for info in pkgutil.walk_packages(dsa.kernels.__path__, f"{dsa.kernels.__name__}."):
        if not any(word in info.name for word in words):
            continue
        module = importlib.import_module(info.name)
        for compile_function, arguments in getattr(module, "shipped_variants", list)():
            found[f"{compile_function.__name__}{arguments}"] = digest(cubin(compile_function, *arguments))
    return found


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[list[str], list[str], list[str]]:
    """(changed or gone, new or changed, renamed) variants; a line each."""
    unmatched = defaultdict(list)
    for name, code in after.items():
        if before.get(name) != code:
            unmatched[code].append(name)
    gone, renamed = [], []
    for name, code in before.items():
        if after.get(name) == code:
            continue
        if unmatched[code]:
            renamed.append(f"{name} -> {unmatched[code].pop(0)}")
        else:
            gone.append(name)
    return gone, sorted(name for names in unmatched.values() for name in names), renamed


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.machine_code", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("file", type=Path, help="digests of the variants, JSON")
    parser.add_argument("words", nargs="*", help="of the names of modules; all modules without one")
    args = parser.parse_args(arguments)
    now = digests(args.words or ("",))
    if args.action == "write":
        args.file.write_text(json.dumps(now, indent=1) + "\n")
        print(f"{len(now)} variants")
        return 0
    before = json.loads(args.file.read_text())
    gone, new, renamed = differences(before, now)
    if args.words:  # the others' variants have not been looked at
        gone = [name for name in gone if name.partition("(")[0] in {other.partition("(")[0] for other in now}]
    for mark, lines in (("-", gone), ("+", new)):
        for line in lines:
            print(mark, line)
    same = len(now) - len(new) - len(renamed)
    print(f"{same} variants as before, {len(renamed)} renamed, {len(gone)} changed or gone, {len(new)} changed or new")
    return 1 if gone or new else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
