"""An object file contains host code that other machines can run, and exactly one cubin."""

import re

import pytest

from dsa.runtime import compile_cache
from dsa.runtime.compile_cache import cubin
from dsa.runtime.object_file import cubin_in, write_object_file
from tests.kernels.cached_casts import ARGS, ORIGINAL, counted, objects

pytestmark = pytest.mark.usefixtures("directory")


def test_another_machine_can_load_an_object_file(directory, tmp_path):
    """The file must not depend on the Python version or on the CPU model, which are not part of the cache's key."""
    kernel = ORIGINAL(*ARGS)
    write_object_file(kernel, tmp_path / "kernel.o", "entry")
    assert not re.search(rb"\0_?Py[A-Z_]", (tmp_path / "kernel.o").read_bytes())
    write_object_file(kernel, tmp_path / "kernel.ll", "entry")  # the same code as LLVM IR
    lines = (tmp_path / "kernel.ll").read_text().splitlines()
    portable = [line.split()[1] for line in lines if line.startswith("attributes") and '"target-cpu"="generic"' in line]
    defined = [line.removesuffix(" {").split()[-1] for line in lines if line.startswith("define ")]
    assert len(defined) > 5 and set(defined) <= set(portable)
    assert "x86-64" not in "".join(lines) and "+avx" not in "".join(lines)


def test_cubin_is_that_of_the_object_file(directory, monkeypatch):
    get, compiled = counted()
    code = cubin(get, *ARGS)
    (path,) = objects(directory)
    assert code[:4] == b"\x7fELF" and path.read_bytes().count(code) == 1 and compiled == [ARGS]
    assert callable(get(*ARGS)) and cubin(get, *ARGS) == code and compiled == [ARGS]
    monkeypatch.setenv("DSA_CACHE_DIR", "")
    assert cubin(get, *ARGS) == code and compiled == [ARGS, ARGS]


def test_cubin_is_what_the_compiler_keeps(tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "OPTIONS", f"{compile_cache.OPTIONS} --keep-cubin --dump-dir {tmp_path}")
    kernel = ORIGINAL(*ARGS)
    write_object_file(kernel, tmp_path / "kernel.o", "entry")
    assert cubin_in((tmp_path / "kernel.o").read_bytes()) == kernel.artifacts.CUBIN


def test_an_object_file_without_a_cubin_is_an_error():
    with pytest.raises(ValueError, match="object_file: must have one cubin in it, got 0"):
        cubin_in(b"\x7fELF" * 20)
