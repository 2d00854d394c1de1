"""Tests of the choice between kernel and reference: by GPU, environment variable and `use_backend`."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dsa
from dsa.ops.elementwise import _rms_norm_gradient
from dsa.runtime import backends


class _OnCuda(torch.Tensor):
    device = torch.device("cuda", 0)


class _OnAnother(torch.Tensor):
    device = torch.device("cuda", 1)


def on_gpu(kind=_OnCuda):
    return torch.zeros(1, device="meta").as_subclass(kind)


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.delenv("DSA_BACKEND", raising=False)
    monkeypatch.setattr(backends, "why_no_kernels", lambda *_: None)
    monkeypatch.setattr(backends, "arch_of", lambda _: "sm_90")
    monkeypatch.setattr(backends, "_warned", set())


def test_the_machine_decides(monkeypatch, hopper):
    assert dsa.backend() == "cute"
    assert not backends.runs_kernel("op", torch.zeros(1))
    assert backends.runs_kernel("op", on_gpu())
    monkeypatch.setattr(backends, "why_no_kernels", lambda *_: "no GPU")
    assert dsa.backend() == "reference"


@pytest.mark.parametrize("current", [0, 1])
def test_each_tensors_gpu_decides(monkeypatch, current):
    """GPU 0 is sm_80 and gets the reference. GPU 1 is sm_90 and gets a kernel. `dsa.backend()` is about the current
    GPU."""
    monkeypatch.delenv("DSA_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(backends, "arch_of", lambda device: ("sm_80", "sm_90")[device.index])
    monkeypatch.setattr(backends, "_why_no_kernels_on", backends._why_no_kernels_on.__wrapped__)
    ampere, hopper = on_gpu(), on_gpu(_OnAnother)
    assert not backends.runs_kernel("rms_norm", ampere) and backends.runs_kernel("rms_norm", hopper)
    assert dsa.backend() == ("reference", "cute")[current]
    with dsa.use_backend("cute"):
        assert backends.runs_kernel("rms_norm", hopper)
        with pytest.raises(ValueError, match="rms_norm: backend 'cute' was asked for, but the GPU is sm_80"):
            backends.runs_kernel("rms_norm", ampere)


def test_a_part_of_an_op_runs_on_the_archs_of_its_kernels(monkeypatch, hopper):
    monkeypatch.setitem(backends.ARCHS, "rms_norm", ["sm_90", "sm_100"])
    monkeypatch.setattr(backends, "arch_of", lambda _: "sm_100")
    assert backends.runs_kernel("rms_norm", on_gpu())
    with pytest.warns(UserWarning, match=r"dsa\.rms_norm has no sm_100 kernel yet"):
        assert not _rms_norm_gradient.has_kernel(on_gpu())


def test_the_environment_goes_before_the_machine_and_the_block_before_both(monkeypatch, hopper):
    monkeypatch.setenv("DSA_BACKEND", "reference")
    assert dsa.backend() == "reference"
    with dsa.use_backend("cute"):
        with dsa.use_backend("reference"):
            assert dsa.backend() == "reference"
        assert dsa.backend() == "cute"
        with pytest.raises(ValueError, match="op: backend 'cute' was asked for, but the tensors"):
            backends.runs_kernel("op", torch.zeros(1))
    assert dsa.backend() == "reference"


def test_unknown_names_are_errors(monkeypatch):
    with pytest.raises(ValueError, match="use_backend: must be one of cute, reference, got 'triton'"):
        with dsa.use_backend("triton"):
            pass
    assert dsa.backend() in backends.BACKENDS
    monkeypatch.setenv("DSA_BACKEND", "fast")
    with pytest.raises(ValueError, match="DSA_BACKEND: must be one of cute, reference, got 'fast'"):
        dsa.backend()


def test_an_op_without_a_kernel_for_this_gpu_or_dtype_says_so_once(monkeypatch, hopper):
    with pytest.warns(UserWarning, match=r"dsa\.some_op has no Hopper kernel yet"):
        backends.note_reference_only("some_op", on_gpu())
    monkeypatch.setitem(backends.ARCHS, "another", ["sm_90"])
    monkeypatch.setattr(backends, "arch_of", lambda _: "sm_100")
    with pytest.warns(UserWarning, match=r"dsa\.another has no sm_100 kernel yet"):
        assert not backends.runs_kernel("another", on_gpu())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backends.note_reference_only("some_op", on_gpu())
        backends.note_reference_only("some_op", torch.zeros(1))
        assert not backends.runs_kernel("another", on_gpu())
    message = r"another: backend 'cute' was asked for, but the GPU is sm_100, .* kernels are for sm_90 \(Hopper\)"
    with dsa.use_backend("cute"), pytest.raises(ValueError, match=message):
        backends.runs_kernel("another", on_gpu())


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be asked")
def test_fake_tensors_of_a_gpu_that_is_not_there():
    with FakeTensorMode():
        x = torch.empty(4, 128, device="cuda", dtype=torch.bfloat16)
        assert dsa.rms_norm(x, torch.empty(128, device="cuda"), 1e-6).shape == (4, 128)
