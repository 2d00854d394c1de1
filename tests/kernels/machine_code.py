"""The record of the kernels' machine code: a source change that leaves the machine code the same needs no GPU run.

usage: python -m tests.kernels.machine_code [--all] [--check]

For each family of kernels (a folder of dsa/kernels), machine_code.json contains the key of the source (`key_of`), and
for each variant that the family ships a digest of the code that runs: instructions, constants, registers and shared
memory of the kernels, and the host code that computes their grids. Symbols do not affect a digest, so names in the
source may change.

The command compiles the families whose key has changed, prints which variants are changed, new, gone or renamed, and
writes the file. --all compiles every family. --check writes nothing, and exits with 1 if a variant is changed, new or
gone.
"""

import argparse
import functools
import hashlib
import importlib
import json
import math
import os
import pkgutil
import re
import struct
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import dsa.kernels
from dsa.runtime.object_file import cubin_in
from tests.code_lines import code_lines

PATH = Path(__file__).with_suffix(".json")
FAMILIES = Path(dsa.kernels.__path__[0])
SHARED = FAMILIES.parent / "cute"
_NO_BYTES = 8  # SHT_NOBITS: type of a section that has a size but no bytes in the file
_SIZED = 4  # .nv.info: format of an attribute whose entry contains the size of its value
_REGISTERS, _BLOCK = 0x2F, 0x10  # .nv.info attributes; values: (symbol, registers per thread), (x, y, z) of a CTA
_KINDS = ".text.", ".nv.constant0.", ".nv.shared."
_LAUNCHER = "_mlir_ciface_"  # prefix of the name of the host function that computes grids and launches
_SYMBOL = "<IBBHQQ"  # fields of an ELF symbol: name, info, other, section, value, size
_CONSTANTS = ".rodata.cst"  # section of the host code's vector constants, up to 16 bytes each
_HANDLES = ".lbss"  # section of the handles of kernels, in the order of their first launches

Digests = dict[str, str]


def digest(object_file: bytes) -> str:
    """Return a digest of a compiled variant: its kernels' code and the host code that launches them, without
    symbols."""
    cubin = cubin_in(object_file)
    # The cubin contains the kernels in the reverse order of their first launches, so this order affects the digest.
    parts = [f"{kind} {size} {hashlib.sha256(code).hexdigest()}" for kind, size, code in code_sections(cubin)]
    parts += [f"registers {[*registers(cubin)]}", f"launcher {hashlib.sha256(launcher(object_file)).hexdigest()}"]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def code_sections(cubin: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Yield (one of _KINDS, size, content) for each section of a kernel's instructions, constants or shared memory."""
    for name, size, content in _sections(cubin):
        for kind in _KINDS:
            if name.startswith(kind):
                yield kind, size, content


def registers(cubin: bytes) -> list[int]:
    return [struct.unpack("<II", value)[1] for value in _attributes(cubin, _REGISTERS)]


def threads(cubin: bytes) -> list[int]:
    return [math.prod(struct.unpack("<III", value)) for value in _attributes(cubin, _BLOCK)]


def _attributes(cubin: bytes, wanted: int) -> Iterator[bytes]:
    """Yield each kernel's value of the .nv.info attribute numbered `wanted`."""
    for name, _, content in _sections(cubin):
        at = 0
        while name.startswith(".nv.info") and at < len(content):
            form, attribute, size = struct.unpack_from("<BBH", content, at)
            if (form, attribute) == (_SIZED, wanted):
                yield content[at + 4 : at + 4 + size]
            at += 4 + (size if form == _SIZED else 0)


def launcher(object_file: bytes) -> bytes:
    """Return the code of the host functions that launch kernels: instructions, vector constants, and the index of each
    launch's kernel."""
    sections = [*_sections(object_file)]
    contents = {name: content for name, _, content in sections}
    symbols = [
        (_text(contents[".strtab"], name), section, value, size)
        for name, _, _, section, value, size in struct.iter_unpack(_SYMBOL, contents[".symtab"])
    ]
    (function,) = [name.partition(_LAUNCHER)[2] for name, *_ in symbols if _LAUNCHER in name]
    parts = []
    for _, section, start, size in sorted(symbol for symbol in symbols if symbol[0].endswith(function)):
        text, _, code = sections[section]
        parts.append(code[start : start + size])
        for at, info, addend in struct.iter_unpack("<QQq", contents[f".rela{text}"]):
            target = symbols[info >> 32][1]
            if not start <= at < start + size or target >= len(sections):
                continue
            if sections[target][0].startswith(_CONSTANTS):
                parts.append(sections[target][2][addend : addend + 16])
            elif sections[target][0] == _HANDLES:
                parts.append(f"kernel {addend}".encode())
    return b"".join(parts)


def _sections(elf: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Yield (name, size, content) of each section of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry, count, names = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + i * entry) for i in range(count)]
    for name, type_, _, _, offset, size in heads:
        content = b"" if type_ == _NO_BYTES else elf[offset : offset + size]
        yield _text(elf, heads[names][4] + name), size, content


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def name_of(compile_function: Any, arguments: tuple) -> str:
    return f"{compile_function.__module__.rpartition('.')[2]}.{compile_function.__name__}{arguments!r}"


def families() -> list[str]:
    return sorted(path.parent.name for path in FAMILIES.glob("*/__init__.py"))


def key_of(family: str) -> str:
    """Return a key of the family's source, the source of dsa/cute and the compiler's options. Kernels import nothing
    else of this project. The key ignores comments and docstrings, so rewording them needs no compiler and no GPU."""
    from dsa.runtime.compile_cache import OPTIONS

    digest = hashlib.sha256(OPTIONS.encode())
    for folder in (FAMILIES / family, SHARED):
        for path in sorted(folder.rglob("*.py")):
            lines = code_lines(path.read_text(encoding="utf-8-sig"))
            digest.update("\n".join([f"{path.relative_to(folder)} {len(lines)}", *lines]).encode())
    return digest.hexdigest()[:16]


def without_names(variant: str) -> str:
    """Return the arguments in a variant's name. The names of functions, configurations and their fields are left out,
    because they may change."""
    return re.sub(r"\w+=|\w+(?=\()", "", variant[variant.index("(") :])


@functools.cache
def shipped(family: str) -> dict[str, tuple[Any, tuple]]:
    """Return {name: (compile function, arguments)} of the family's shipped variants."""
    package = f"{dsa.kernels.__name__}.{family}"
    modules = [importlib.import_module(m.name) for m in pkgutil.iter_modules([str(FAMILIES / family)], f"{package}.")]
    variants = [variant for module in modules for variant in getattr(module, "shipped_variants", list)()]
    return {name_of(*variant): variant for variant in variants}


def recorded() -> dict[str, Any]:
    """Return {"dsl": version of the CuTe DSL, "families": {family: {"key": the source's key, "variants": {name:
    digest}}}}."""
    if not PATH.exists():
        return {"dsl": None, "families": {}}
    try:
        return json.loads(PATH.read_text())
    except ValueError as error:
        raise ValueError(f"{PATH}: not JSON ({error}); delete it and write it anew with --all") from None


def changed_families() -> list[str]:
    there = recorded()["families"]
    return [f for f in families() if f not in there or there[f]["key"] != key_of(f)]


def compiled(names: Iterable[str]) -> dict[str, Digests]:
    """Compile these families' variants on all cores, unless the compile cache has them. Return {family: {variant:
    digest}}."""
    from dsa.runtime.build import build
    from dsa.runtime.compile_cache import cache_dir, object_file
    from dsa.runtime.variants import Variant

    names = [*names]
    with tempfile.TemporaryDirectory() as own:
        directory = cache_dir() or Path(own)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        variants = [Variant(f.__module__, f.__name__, a) for family in names for f, a in shipped(family).values()]
        for _ in build(variants, directory, len(os.sched_getaffinity(0))):
            pass
        return {
            family: {name: digest(object_file(f, *a)) for name, (f, a) in sorted(shipped(family).items())}
            for family in names
        }


def current() -> Digests:
    """Return {name: digest} of today's variants. Only families whose source differs from the recorded one are
    compiled."""
    there = recorded()["families"]
    changed = changed_families()
    digests = compiled(changed) if changed else {}
    return {
        name: code for family in families() for name, code in (digests.get(family) or there[family]["variants"]).items()
    }


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[list[str], list[str], list[str]]:
    """Return (names that changed or are gone, names that changed or are new, "old name -> new name" of renamed
    variants). A variant that keeps its name is not renamed, even if another variant now has its code."""
    unmatched = defaultdict(list)
    for name, code in after.items():
        if before.get(name) != code:
            unmatched[code].append(name)
    gone, renamed = [], []
    for name, code in before.items():
        if name not in after and unmatched[code]:
            renamed.append(f"{name} -> {unmatched[code].pop(0)}")
        elif after.get(name) != code:
            gone.append(name)
    return gone, sorted(name for names in unmatched.values() for name in names), renamed


def _flat(by_family: Mapping[str, Mapping[str, str]]) -> Digests:
    return {name: code for variants in by_family.values() for name, code in variants.items()}


def main(arguments: Sequence[str]) -> int:
    import cutlass

    parser = argparse.ArgumentParser(prog="python -m tests.kernels.machine_code", description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="compile every family, not only those that have changed")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 where a variant's code is another")
    args = parser.parse_args(arguments)
    there = recorded()
    if there["dsl"] not in (None, cutlass.__version__):
        parser.error(f"machine_code.json is of CuTe DSL {there['dsl']}, and {cutlass.__version__} is installed")
    names = families() if args.all else changed_families()
    now = compiled(names)
    before = {f: own["variants"] for f, own in there["families"].items() if f in names or f not in families()}
    gone, new, renamed = differences(_flat(before), _flat(now))
    for mark, lines in (("-", gone), ("+", new), (" ", renamed)):
        for line in lines:
            print(mark, line)
    same = len(_flat(now)) - len(new) - len(renamed)
    print(f"{same} variants as before, {len(renamed)} renamed, {len(gone)} changed or gone, {len(new)} changed or new")
    if args.check:
        return 1 if gone or new else 0
    kept = {f: own for f, own in there["families"].items() if f in families() and f not in names}
    written = {f: {"key": key_of(f), "variants": now[f]} for f in names}
    there = {"dsl": cutlass.__version__, "families": dict(sorted((kept | written).items()))}
    PATH.write_text(json.dumps(there, indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
