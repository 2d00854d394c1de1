"""How peers' packages, source files and shared libraries are found and loaded."""

import sys
import types
from pathlib import Path

import pytest
import torch

from dsa_bench.harness.calls import Peers
from dsa_bench.peers import marlin, operators, probe, topk
from dsa_bench.peers.package import Library, Operators, SourceFile

PAGE = Path(__file__).parents[2] / "docs/reference/peers.md"
VLLM, SGLANG = "vllm/_C_stable_libtorch.abi3.so", "sgl_kernel/sm90/common_ops.abi3.so"
FILES = {
    operators.VLLM: [VLLM],
    operators.SGLANG: [SGLANG],
    marlin.MARLIN: [VLLM, "vllm/_moe_C_stable_libtorch.abi3.so"],
}
DEEPSELECT = f"{topk.DEEPSELECT.package}/{topk.DEEPSELECT.file}"


def test_the_page_of_peers_has_every_library_file_and_op():
    page = PAGE.read_text()
    files = {file for library in probe.LIBRARIES if isinstance(library, Operators) for file in library.files}
    for name in {library.name for library in probe.LIBRARIES} | files | {DEEPSELECT} | probe.probed().keys():
        assert name in page, name


def test_a_broken_library_is_not_taken_for_a_missing_one(monkeypatch, tmp_path):
    (tmp_path / "broken_peer.py").write_text("raise OSError('libcuda.so.1: no such file')")
    (tmp_path / "needy_peer.py").write_text("import an_absent_module")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("broken_peer", "needy_peer", "absent_peer", "absent_peer.inside")
    libraries = [Library(name, (name,)) for name in names]
    peers = Peers.of({library: lambda module: pytest.fail("called") for library in libraries}, [()])
    failed = {
        "broken_peer": "failed: libcuda.so.1: no such file",
        "needy_peer": "failed: No module named 'an_absent_module'",
    }
    assert peers == Peers({}, failed)
    monkeypatch.setattr(probe, "LIBRARIES", libraries[::2])
    assert probe.missing() == ["broken_peer: failed: libcuda.so.1: no such file", "absent_peer: not installed"]


def test_a_library_may_be_installed_in_several_places(monkeypatch):
    monkeypatch.setitem(sys.modules, "here", None)
    monkeypatch.setitem(sys.modules, "there", types.ModuleType("there"))
    assert Library("it", ("here", "there")).load() is sys.modules["there"]
    assert Library("it", ("here",)).load() is None


@pytest.fixture
def packages(monkeypatch, tmp_path, no_peers):
    """Return a folder on Python's path with files in place of the shared libraries and of a source file. Importing one
    of the packages raises an error."""
    for file in {*(file for files in FILES.values() for file in files), "an_engine/ops/select.py"}:
        package, *_ = Path(file).parts
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("selected = object()")
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported')")
        monkeypatch.delitem(sys.modules, package, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def loaded(monkeypatch):
    paths = []
    monkeypatch.setattr(torch.ops, "load_library", paths.append)
    return paths


@pytest.mark.parametrize("library", FILES, ids=lambda library: library.name)
def test_operators_are_loaded_without_importing_their_package(library, packages, loaded):
    assert library.load() is torch.ops
    assert loaded == [str(packages / file) for file in FILES[library]]
    assert not {"vllm", "sgl_kernel"} & sys.modules.keys()


@pytest.mark.parametrize("file", sorted({file for files in FILES.values() for file in files}))
def test_operators_without_one_of_their_files_are_not_installed(file, packages, loaded):
    (packages / file).unlink()
    for library, files in FILES.items():
        assert (library.load() is None) == (file in files)
    assert str(packages / file) not in loaded


def test_a_source_file_is_executed_once_and_without_its_package(packages):
    file = SourceFile("it", "an_engine", "ops/select.py")
    assert file.load().selected is file.load().selected and "an_engine" not in sys.modules


@pytest.mark.parametrize(
    "library",
    [
        SourceFile("it", "an_engine", "ops/absent.py"),
        SourceFile("it", "absent_engine", "ops/select.py"),
        Operators("it", "absent_engine", ("operators.so",)),
        Operators("it", "this", ("operators.so",)),  # a module, not a package
    ],
)
def test_an_absent_file_is_not_installed(library, packages, loaded):
    assert library.load() is None and loaded == []


def test_a_shared_library_that_cannot_be_loaded_fails_with_the_reason(packages, monkeypatch):
    """torch's message does not have the reason. The message of the exception's cause has it."""
    peers = Peers.of({operators.SGLANG: lambda module: pytest.fail("called")}, [()])
    assert peers.calls == {} and "Could not" not in peers.failed["sglang"]
    assert peers.failed["sglang"].startswith("failed: ") and str(packages / SGLANG) in peers.failed["sglang"]

    def load_library(path):
        raise OSError(f"Could not load this library: {path}") from OSError("libcuda.so.1: cannot open")

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    peers = Peers.of({operators.VLLM: lambda module: pytest.fail("called")}, [()])
    assert peers.failed["vllm"] == "failed: libcuda.so.1: cannot open"


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize(("gone", "there"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_either_engines_operators_work_without_the_others(gone, there, broken, peers, installed, monkeypatch):
    (installed / DEEPSELECT).unlink()
    file, load = {"vllm": VLLM, "sglang": SGLANG}[gone], torch.ops.load_library

    def load_library(path):
        if path.endswith(file):
            raise OSError("undefined symbol")
        load(path)

    if broken:
        monkeypatch.setattr(torch.ops, "load_library", load_library)
    else:
        (installed / file).unlink()
    q, kv = torch.randn(3, 32, 32).to(torch.float8_e4m3fn), torch.randn(2500, 32).to(torch.float8_e4m3fn)
    starts, ends = torch.zeros(3, dtype=torch.int32), torch.full((3,), 2500, dtype=torch.int32)
    for found in (
        topk.select([(torch.randn(3, 2500), ends, 2048)]),
        operators.cast([(torch.randn(2, 128, dtype=torch.bfloat16), True)]),
        operators.merge([([torch.randn(2, 2, 8)] * 2, [torch.randn(2, 2)] * 2)]),
        topk.select_scored(q, (kv, torch.ones(2500)), torch.ones(3, 32), starts, ends, 2048),
    ):
        assert found.calls and all(there in peer and gone not in peer for peer in found.calls)
        assert all(gone in peer and why == "failed: undefined symbol" for peer, why in found.failed.items())
        assert bool(found.failed) == broken


@pytest.mark.parametrize("gone", [(VLLM, SGLANG, DEEPSELECT), ("vllm.third_party.deep_gemm",)])
def test_scores_and_topk_need_both_libraries(gone, peers, installed, monkeypatch):
    for name in gone:
        if "/" in name:
            (installed / name).unlink()
        else:
            monkeypatch.setitem(sys.modules, name, None)
    zeros = [torch.zeros(1)] * 3
    assert topk.select_scored(torch.zeros(1, 1, 1), (torch.zeros(1, 1), zeros[0]), *zeros, 2048) == Peers()
