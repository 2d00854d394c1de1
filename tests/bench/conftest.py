"""Fixtures: stubs of the peers' packages and shared libraries, recorded calls, and benchmark cases on a CPU."""

import concurrent.futures
import importlib.machinery
import sys
import types
from pathlib import Path

import pytest
import torch

import dsa
from dsa.runtime import backends
from dsa_bench.harness import case
from dsa_bench.peers import package, topk
from tests.bench import marlin_stub, peer_stubs

MODULES = ("flash_mla", "vllm", "vllm.third_party.flashmla.flash_mla_interface", "vllm.third_party.deep_gemm")
MODULES += ("deep_gemm", "sgl_kernel", "cudnn", "tile_kernels", "tokenspeed_kernel")
# {path of a shared library: the namespace that it adds to torch.ops}
SHARED_LIBRARIES = {
    "vllm/_C_stable_libtorch.abi3.so": "_C",
    "vllm/_moe_C_stable_libtorch.abi3.so": "_moe_C",
    "sgl_kernel/sm90/common_ops.abi3.so": "sgl_kernel",
}


@pytest.fixture
def no_peers(monkeypatch):
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def installed(monkeypatch, no_peers, tmp_path) -> Path:
    """Make empty files in place of the shared libraries and of DeepSelect's source file. Return their folder.

    `torch.ops.load_library` adds stubs of a library's operators to torch.ops.
    """
    operators = {"_C": peer_stubs.vllm_operators(), "_moe_C": marlin_stub.operators()}
    operators["sgl_kernel"] = peer_stubs.sglang_operators()
    for activation in (marlin_stub.silu_and_mul, marlin_stub.silu_and_mul_with_clamp):
        setattr(operators["_C"], activation.__name__, activation)
    folder = tmp_path / "installed"
    selector = folder / topk.DEEPSELECT.package / topk.DEEPSELECT.file
    executed, stub = package._executed, peer_stubs.deepselect()
    monkeypatch.setattr(package, "_executed", lambda path: stub if path == selector else executed(path))
    for file in (*SHARED_LIBRARIES, selector):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    for name in ("vllm", "sgl_kernel", "tokenspeed_kernel"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__spec__.submodule_search_locations = module.__path__ = [str(folder / name)]
        monkeypatch.setitem(sys.modules, name, module)

    def load_library(path):
        namespace = SHARED_LIBRARIES[str(Path(path).relative_to(folder))]
        monkeypatch.setattr(torch.ops, namespace, operators[namespace], raising=False)

    monkeypatch.setattr(torch.ops, "load_library", load_library)
    return folder


@pytest.fixture
def peers(monkeypatch, installed):
    """Return {module: stub} for the peers that are imported as modules."""
    stubs = {
        "flash_mla": peer_stubs.flash_mla(use_legacy=True),
        "vllm.third_party.flashmla.flash_mla_interface": peer_stubs.flash_mla(use_legacy=False, heads=(8, 16, 32)),
        "deep_gemm": peer_stubs.deep_gemm(),
        "vllm.third_party.deep_gemm": peer_stubs.deep_gemm_2_8(),
        "cudnn": peer_stubs.cudnn(),
        "tile_kernels": peer_stubs.tile_kernels(),
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    for name in ("vllm.third_party", "vllm.third_party.flashmla"):
        monkeypatch.setitem(sys.modules, name, object())
    return stubs


@pytest.fixture
def recorded(monkeypatch):
    """Return a function. recorded(owner, name) replaces owner.name by a wrapper and returns a list. Each later call of
    owner.name appends its positional arguments to the list."""

    def record(owner, name):
        calls, function = [], getattr(owner, name)

        def recording(*arguments, **options):
            calls.append(arguments)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, recording)
        return calls

    return record


@pytest.fixture
def in_threads(monkeypatch):
    """Run process pools in a thread of this process. Return a list to which each pool appends `processes`."""
    counts = []

    class Pool(concurrent.futures.ThreadPoolExecutor):
        def __init__(self, processes, mp_context):
            counts.append(processes)
            super().__init__(1)

    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", Pool)
    return counts


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)


def two_matrices(rows, columns):
    return [(torch.randn(rows, columns, dtype=torch.bfloat16) / 40,) for _ in range(2)]


@pytest.fixture
def on_cpu(monkeypatch):
    """Build and call cases on the CPU, with the smallest number of inputs that a case accepts."""
    monkeypatch.setattr(dsa, "num_sms", lambda device: peer_stubs.SMS)
    product = torch.mm  # on a CPU torch.mm has no out_dtype
    monkeypatch.setattr(
        torch, "mm", lambda a, b, out_dtype=None: product(*(x.to(out_dtype or x.dtype) for x in (a, b)))
    )
    for module in (case, *map(case.load, case.benchmarks())):
        monkeypatch.setattr(module, "copies", lambda size, least=2, **bounds: least, raising=False)
        monkeypatch.setattr(module, "fresh_matrices", two_matrices, raising=False)
        monkeypatch.setattr(module, "_PLANS", 1, raising=False)
    with peer_stubs.OnCpu():
        yield
