"""Helpers for tests of the compile cache: the FP8 cast's compile function with an empty cache, a stub kernel, and ways
to damage an object file."""

import functools
from pathlib import Path
from types import SimpleNamespace

from dsa.kernels.gemm import per_token_cast_to_fp8_sm90 as kernels
from dsa.runtime.compile_cache import cached

ORIGINAL = kernels.compile_per_token_cast_to_fp8.__wrapped__
ARGS = kernels.shipped_variants()[0][1]
OTHER_ARGS = kernels.shipped_variants()[-1][1]


def counted(compile_function=ORIGINAL):
    """Return (function, list). The function compiles with `compile_function` and has a new in-memory cache. The list
    records the arguments of each compilation."""
    compiled = []

    @functools.wraps(ORIGINAL)
    def counting(*args):
        compiled.append(args)
        return compile_function(*args)

    return cached(counting), compiled


def compiled_for(*calls):
    """Call the FP8 cast's compile function for each tuple in `calls`, with an empty in-memory cache. Return the
    arguments of each compilation."""
    get, compiled = counted()
    for arguments in calls:
        assert callable(get(*arguments))
    return compiled


class StubKernel:
    """A compiled kernel that writes its object file in two halves. Between them, it records the suffixes of the
    directory's files in `seen`, and raises `fails_with` if given."""

    def __init__(self, fails_with=None):
        self.ir_module = SimpleNamespace(operation=SimpleNamespace(walk=lambda visit: None))
        self.fails_with = fails_with
        self.seen = None

    def export_to_c(self, object_file_path, function_name):
        with open(object_file_path, "wb") as file:
            file.write(b"first half,")
            file.flush()
            self.seen = suffixes(Path(object_file_path).resolve().parent)
            if self.fails_with is not None:
                raise self.fails_with
            file.write(b" second half")


def objects(directory):
    return sorted(directory.glob("*.o"))


def suffixes(directory):
    return sorted(path.suffix for path in directory.iterdir())


def with_a_flipped_bit(content):
    """An object file with one flipped bit can load without an error, but its code is wrong."""
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]


DAMAGES = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "noise": lambda content: b"no object file",
    "one bit": with_a_flipped_bit,
}
