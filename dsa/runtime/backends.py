"""Which implementation an op runs: "cute" (CuTe DSL kernels) or "reference" (plain PyTorch, on any device).

ARCHS lists the GPUs for which an op has kernels. By default, ops run the kernels for tensors on one of these GPUs if
CuTe DSL is installed, and the references otherwise. The environment variable DSA_BACKEND forces one backend. `with
use_backend(...)` does, too, and takes precedence. If the kernels do not accept a shape, the op raises an error and does
not run the reference. If other ops have kernels for the GPU but this op has none, either at all or for the dtype of the
tensors, the op warns once and runs the reference.
"""

import contextlib
import contextvars
import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator

import torch

from dsa.runtime.checks import torch_device

BACKENDS = ("cute", "reference")
# Public function -> the archs for which at least one op of it has kernels (dsa.runtime.op).
ARCHS: dict[str, list[str]] = {}
ARCH_NAMES = {"sm_90": "Hopper", "sm_100": "Blackwell", "sm_103": "Blackwell Ultra", "sm_120": "Blackwell RTX"}
_override: contextvars.ContextVar[str | None] = contextvars.ContextVar("dsa_backend", default=None)


def archs() -> list[str]:
    return sorted({arch for archs in ARCHS.values() for arch in archs})


def why_no_kernels(device: torch.device | None = None) -> str | None:
    """Return the reason why kernels cannot run on a GPU (by default the current one); None if they can."""
    if device is None and torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    return _why_no_kernels_on(device)


@functools.cache
def _why_no_kernels_on(gpu: torch.device | None) -> str | None:
    if gpu is None or not torch.cuda.is_available():  # a fake tensor may be on a GPU that does not exist
        return "torch sees no CUDA GPU"
    if (arch := arch_of(gpu)) not in archs():
        return f"the GPU is {arch}, and the kernels are for {_names(archs())}"
    if importlib.util.find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed"
    return None


@functools.cache
def arch_of(device: torch.device) -> str:
    """Return the arch of a GPU, such as "sm_90"."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"{arch} ({ARCH_NAMES[arch]})" if arch in ARCH_NAMES else arch for arch in names)


# A look-up in `os.environ` takes a microsecond, mostly to encode the name.
_environment, _VARIABLE = os.environ._data, os.environ.encodekey("DSA_BACKEND")


def _chosen() -> str | None:
    name, source = _override.get(), "use_backend"
    if name is None:
        if not _environment.get(_VARIABLE):
            return None
        name, source = os.environ["DSA_BACKEND"], "DSA_BACKEND"
    if name not in BACKENDS:
        raise ValueError(f"{source}: must be one of {', '.join(BACKENDS)}, got {name!r}")
    return name


def backend() -> str:
    """Return the backend that ops use for tensors on the current GPU: "cute" or "reference"."""
    return _chosen() or ("reference" if why_no_kernels() else "cute")


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend in a `with` block, for this thread or task."""
    token = _override.set(name)
    try:
        _chosen()
        yield
    finally:
        _override.reset(token)


def allows_kernels() -> bool:
    """Whether a call may launch kernels, if an equal call launched them before: only the chosen backend can have
    changed."""
    return _chosen() != "reference"


def runs_kernel(op: str, tensor: torch.Tensor, of_part: Collection[str] = ()) -> bool:
    """Whether the public function `op` launches kernels for `tensor`. Warns once if no backend is forced and the GPU
    has kernels of other ops, but not of `op`. Raises ValueError if backend "cute" is forced and kernels cannot run.

    of_part  the archs for which a part of the op has kernels; (): the archs of the whole op
    """
    chosen, device = _chosen(), tensor.device
    if chosen == "reference" or (chosen is None and device.type != "cuda"):
        return False
    if device.type == "cuda":
        reason = why_no_kernels(device)
    else:
        reason = why_no_kernels() or f"the tensors are on {device}"
    if reason is None and (arch := arch_of(device)) not in (there := of_part or ARCHS.get(op) or archs()):
        reason = f"the GPU is {arch}, and the op's kernels are for {_names(there)}"
        if chosen is None and op not in _warned:
            _warned.add(op)
            warnings.warn(f"dsa.{op} has no {arch} kernel yet: its PyTorch reference runs instead", stacklevel=_level())
    if reason is not None and chosen == "cute":
        raise ValueError(f"{op}: backend 'cute' was asked for, but {reason}; use backend 'reference'")
    return reason is None


_warned: set[str] = set()


def _level() -> int:
    """Return the stack level of the code that called this package, for `warnings.warn`."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "dsa":
        frame, level = frame.f_back, level + 1
    return level


_NO_SWITCH = contextlib.nullcontext()


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Return a context manager that makes the tensor's GPU the current one."""
    if tensor.device.index == torch.cuda.current_device():
        return _NO_SWITCH
    return torch.cuda.device(tensor.device)


def num_sms(device: torch.device | str) -> int:
    """Return the number of SMs of a GPU; for a CPU 132, as on an H200, so that plans on a CPU equal those on an H200.

    Raises TypeError or ValueError if `device` is not a device.
    """
    device = torch_device("device", device)
    if device.type != "cuda":
        return 132
    if not torch.cuda.is_available():
        raise ValueError(f"device: must exist, got {device} and no GPU")
    return torch.cuda.get_device_properties(device).multi_processor_count


def note_reference_only(op: str, tensor: torch.Tensor) -> None:
    """Warn once that `op` has no kernel and its PyTorch reference runs. There is no warning if no kernel could run for
    `tensor` anyway (`runs_kernel`)."""
    if op not in _warned and runs_kernel(op, tensor):
        _warned.add(op)
        arch = arch_of(tensor.device)
        name = ARCH_NAMES.get(arch, arch)
        warnings.warn(f"dsa.{op} has no {name} kernel yet: its PyTorch reference runs instead", stacklevel=_level())
