"""Fixtures and parametrization for tests of kernels: shipped variants and their SASS (the disassembled machine
code)."""

import hashlib
import os

import pytest

from dsa.runtime import sass as disassembly
from dsa.runtime.compile_cache import cubin
from dsa.runtime.sass import Sass
from tests.kernels.variants import sample, sass_of, shipped_variants_of


@pytest.fixture(scope="session", autouse=True)
def disassembled_once(tmp_path_factory):
    """Keep the disassembler's output in files. Tests in several processes need the SASS of one variant, and each run of
    the disassembler takes half a second."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "sass"
    folder.mkdir(exist_ok=True)
    disassembler = disassembly._cuobjdump

    def kept(cubin: bytes, *options: str) -> list[str]:
        paths = [folder / f"{hashlib.sha256(cubin).hexdigest()}{option}" for option in options]
        for path, option in zip(paths, options):
            if not path.exists():
                partial = path.with_name(f"{path.name}.{os.getpid()}")
                partial.write_text(*disassembler(cubin, option))
                partial.replace(path)  # atomically, because another process may read the file
        return [path.read_text() for path in paths]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disassembly, "_cuobjdump", kept)
        yield


@pytest.fixture
def sass(compile_function, arguments) -> Sass:
    return sass_of(compile_function, *arguments)


@pytest.fixture
def in_order(compile_function, arguments) -> list[list[str]]:
    """Return a list per kernel of the variant: its instruction names, ordered by address."""
    return disassembly.instructions_in_order(cubin(compile_function, *arguments))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("shipped_variants")
    if marker is None:
        return
    variants = []
    for compile_function in marker.args:
        shipped = shipped_variants_of(compile_function)
        variants += shipped if metafunc.config.getoption("all") else sample(shipped)
    ids = [f"{compile_function.__name__}-{arguments}" for compile_function, arguments in variants]
    metafunc.parametrize(("compile_function", "arguments"), variants, ids=ids)
