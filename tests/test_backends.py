"""Which implementation runs, and who decides."""

import warnings

import pytest
import torch

import dsa
from dsa import backends


@pytest.fixture
def hopper(monkeypatch):
    """As if torch saw a Hopper GPU."""
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    monkeypatch.setattr(backends, "arch_of", lambda _: "sm_90")
    monkeypatch.setattr(backends, "_warned", set())


def test_the_machine_decides(monkeypatch, hopper):
    monkeypatch.delenv("DSA_BACKEND", raising=False)
    monkeypatch.setattr(backends, "why_no_kernels", lambda: "no GPU")
    assert dsa.backend() == "reference"
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    assert dsa.backend() == "cute"
    # Tensors on the CPU run there even beside a Hopper GPU.
    assert not backends.runs_kernel("op", torch.zeros(1))
    assert backends.runs_kernel("op", torch.zeros(1, device="meta").as_subclass(_OnCuda))


class _OnCuda(torch.Tensor):
    device = torch.device("cuda", 0)


def test_the_environment_goes_before_the_machine_and_the_block_before_both(monkeypatch):
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    monkeypatch.setenv("DSA_BACKEND", "reference")
    assert dsa.backend() == "reference"
    with dsa.use_backend("cute"):
        assert dsa.backend() == "cute"
        with dsa.use_backend("reference"):
            assert dsa.backend() == "reference"
    assert dsa.backend() == "reference"


def test_unknown_names_are_errors(monkeypatch):
    with pytest.raises(ValueError, match="use_backend: must be one of cute, reference, got 'triton'"):
        with dsa.use_backend("triton"):
            pass
    assert dsa.backend() in backends.BACKENDS
    monkeypatch.setenv("DSA_BACKEND", "fast")
    with pytest.raises(ValueError, match="DSA_BACKEND: must be one of cute, reference, got 'fast'"):
        dsa.backend()


def test_cpu_tensors_cannot_run_a_kernel(monkeypatch):
    monkeypatch.setattr(backends, "why_no_kernels", lambda: None)
    with dsa.use_backend("cute"), pytest.raises(ValueError, match="op: backend 'cute' was asked for, but the tensors"):
        backends.runs_kernel("op", torch.zeros(1))


def test_an_op_without_a_kernel_for_this_gpu_says_so_once(monkeypatch, hopper):
    monkeypatch.setitem(backends.KERNELS, "some_op", {"sm_90": "a_module"})
    monkeypatch.setattr(backends, "arch_of", lambda _: "sm_100")
    on_gpu = torch.zeros(1, device="meta").as_subclass(_OnCuda)
    with pytest.warns(UserWarning, match=r"dsa\.some_op has no sm_100 kernel yet"):
        assert not backends.runs_kernel("some_op", on_gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not backends.runs_kernel("some_op", on_gpu)
    message = r"some_op: backend 'cute' was asked for, but the GPU is sm_100, .* kernels are for sm_90 \(Hopper\)"
    with dsa.use_backend("cute"), pytest.raises(ValueError, match=message):
        backends.runs_kernel("some_op", on_gpu)


def test_a_dtype_without_a_kernel_says_so_once(hopper):
    on_gpu = torch.zeros(1, device="meta").as_subclass(_OnCuda)
    with pytest.warns(UserWarning, match=r"dsa\.some_op has no Hopper kernel yet"):
        backends.note_reference_only("some_op", on_gpu)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backends.note_reference_only("some_op", on_gpu)
        backends.note_reference_only("other_op", torch.zeros(1))
