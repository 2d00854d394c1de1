"""Parameters of tests of kernels: the variants that `variants.shipped` asks for; their machine code as text."""

import hashlib
import os
from pathlib import Path

import pytest

from dsa.runtime import sass
from tests.kernels.variants import sample, shipped_variants_of


@pytest.fixture(scope="session", autouse=True)
def disassembled_once(tmp_path_factory):
    """A kernel's own tests and those of all kernels read the same code, in several processes, and the disassembler
    takes half a second to start."""
    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "sass"
    folder.mkdir(exist_ok=True)
    disassembler = sass._cuobjdump

    def kept(cubin: bytes, *options: str) -> list[str]:
        paths = [folder / f"{hashlib.sha256(cubin).hexdigest()}{option}" for option in options]
        for path, option in zip(paths, options):
            if not path.exists():
                _write(path, *disassembler(cubin, option))
        return [path.read_text() for path in paths]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sass, "_cuobjdump", kept)
        yield


def _write(path: Path, text: str) -> None:
    """All at once: another process may look for it."""
    own = path.with_name(f"{path.name}.{os.getpid()}")
    own.write_text(text)
    own.replace(path)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("shipped_variants")
    if marker is None:
        return
    variants = []
    for compile_function in marker.args:
        shipped = shipped_variants_of(compile_function)
        variants += shipped if metafunc.config.getoption("all") else sample(shipped)
    if "compile_function" in metafunc.fixturenames:
        ids = [f"{compile_function.__name__}-{arguments}" for compile_function, arguments in variants]
        metafunc.parametrize(("compile_function", "arguments"), variants, ids=ids)
    else:
        metafunc.parametrize("arguments", [arguments for _, arguments in variants], ids=str)
