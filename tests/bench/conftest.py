"""The peers' packages as stubs, and benchmarks' cases on a CPU."""

import sys

import pytest
import torch

import dsa
from dsa_bench.harness import case
from tests.bench import marlin_stub, peer_stubs

MODULES = ("flash_mla", "vllm", "vllm.third_party.flashmla.flash_mla_interface", "vllm.third_party.deep_gemm")
MODULES += ("deep_gemm", "deep_gemm28", "peer_topk", "peer_marlin", "cudnn")


@pytest.fixture
def no_peers(monkeypatch):
    """No peer is installed, whatever this machine has."""
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def peers(monkeypatch, no_peers):
    """All are: name -> stub."""
    stubs = {
        "flash_mla": peer_stubs.flash_mla(use_legacy=True),
        "vllm.third_party.flashmla.flash_mla_interface": peer_stubs.flash_mla(use_legacy=False, heads=(8, 16, 32)),
        "deep_gemm": peer_stubs.deep_gemm(),
        "deep_gemm28": peer_stubs.deep_gemm28(),
        "cudnn": peer_stubs.cudnn(),
        "peer_topk": object(),
        "peer_marlin": object(),
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    for name in ("vllm", "vllm.third_party", "vllm.third_party.flashmla"):
        monkeypatch.setitem(sys.modules, name, object())
    operators = peer_stubs.vllm_operators()
    for activation in (marlin_stub.silu_and_mul, marlin_stub.silu_and_mul_with_clamp):
        setattr(operators, activation.__name__, activation)
    monkeypatch.setattr(torch.ops, "_C", operators, raising=False)
    monkeypatch.setattr(torch.ops, "_moe_C", marlin_stub.operators(), raising=False)
    monkeypatch.setattr(torch.ops, "sgl_kernel", peer_stubs.sglang_operators(), raising=False)
    return stubs


@pytest.fixture
def on_cpu(monkeypatch):
    """Cases are built and called on the CPU, with as few inputs as they can have."""
    monkeypatch.setattr(dsa, "num_sms", lambda device: peer_stubs.SMS)
    for op in case.benchmarks():
        module = case.load(op)
        for name in ("_FRESH_BYTES", "_PLANS"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, 1)
    with peer_stubs.OnCpu():
        yield
