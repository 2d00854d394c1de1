"""Which implementation an op runs: "cute" (the Hopper kernels) or "reference" (plain PyTorch, on any device).

Without a choice by the user, tensors on an sm_90 GPU take the kernels and all others the references. The environment
variable DSA_BACKEND and `with use_backend(...)`, which goes before it, force one. Nothing falls back quietly: a shape
that a kernel does not take is an error, and an op that has no kernel yet says so once, as a warning.
"""

import contextlib
import contextvars
import functools
import importlib.util
import os
import warnings
from collections.abc import Iterator

import torch

BACKENDS = ("cute", "reference")
_override: contextvars.ContextVar[str | None] = contextvars.ContextVar("dsa_backend", default=None)


@functools.cache
def why_no_kernels() -> str | None:
    """None where the kernels can run, else what is missing."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    if (capability := torch.cuda.get_device_capability()) != (9, 0):
        return f"the GPU is sm_{capability[0]}{capability[1]}, and the kernels are for sm_90 (Hopper)"
    if importlib.util.find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed"
    return None


def _chosen() -> str | None:
    name, source = _override.get(), "use_backend"
    if name is None:
        name, source = os.environ.get("DSA_BACKEND") or None, "DSA_BACKEND"
    if name is not None and name not in BACKENDS:
        raise ValueError(f"{source}: must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


def backend() -> str:
    """The backend that ops use for tensors on the GPU: "cute" or "reference"."""
    return _chosen() or ("reference" if why_no_kernels() else "cute")


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend inside a `with` block (of this thread or task)."""
    token = _override.set(name)
    try:
        _chosen()
        yield
    finally:
        _override.reset(token)


def runs_kernel(op: str, tensor: torch.Tensor) -> bool:
    """Whether `op` launches its kernel on `tensor`; ValueError when the kernels were asked for and cannot run."""
    chosen = _chosen()
    if chosen == "cute":
        reason = why_no_kernels()
        if reason is None and tensor.device.type != "cuda":
            reason = f"the tensors are on {tensor.device}"
        if reason:
            raise ValueError(f"{op}: backend 'cute' was asked for, but {reason}; use backend 'reference'")
        return True
    return chosen is None and tensor.device.type == "cuda" and why_no_kernels() is None


_NO_SWITCH = contextlib.nullcontext()


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Make the tensor's GPU the current one around a launch. Free where it is already."""
    if tensor.device.index == torch.cuda.current_device():
        return _NO_SWITCH
    return torch.cuda.device(tensor.device)


def num_sms(device: torch.device | str) -> int:
    """Multiprocessors of a GPU; for the CPU, an H200's 132, so that plans look the same there."""
    if torch.device(device).type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


_warned: set[str] = set()


def note_reference_only(op: str, tensor: torch.Tensor) -> None:
    """For an op without a kernel: say once that a GPU runs its PyTorch reference."""
    if op not in _warned and runs_kernel(op, tensor):
        _warned.add(op)
        warnings.warn(f"dsa.{op} has no Hopper kernel yet: its PyTorch reference runs instead", stacklevel=3)
