"""The test of this installation, which `dsa check` runs."""

import contextlib
import importlib.metadata
import platform
import time
import warnings
from collections.abc import Iterable

import torch

import dsa
from dsa.cases import check_op
from dsa.ops import op_module, op_modules
from dsa.runtime import backends

PACKAGES = ("dsa-kernels", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python", "safetensors", "tokenizers")


def check() -> int:
    """Print installed versions, the GPU and the backend, and test every op on this machine. Return 0 if all ops pass,
    else 1."""
    print(f"python {platform.python_version()}")
    for package, version in versions(PACKAGES).items():
        print(f"{package} {version or 'not installed'}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"GPU: {torch.cuda.get_device_name() if device == 'cuda' else 'none'}")
    reason = backends.why_no_kernels()
    print(f"backend: {dsa.backend()}" + (f" ({reason})" if reason else ""))
    passed = [_test(name, device) for name in op_modules()]
    print(f"{sum(passed)} of {len(passed)} ops passed")
    return 0 if all(passed) else 1


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return {package: its version, or None if it is not installed}."""
    found = dict.fromkeys(packages)
    for package in found:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _test(op: str, device: str) -> bool:
    """Run the test of an op and print the outcome. Return whether the test passed."""
    started = time.perf_counter()
    outcome = "ok"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ops without a kernel warn, but the report already prints "reference"
            check_op(op, device)
    except Exception as error:
        outcome = f"FAILED: {type(error).__name__}: {error}"
    how = "kernel" if device == "cuda" and _has_kernel(op) else "reference"
    print(f"  {op:<28} {how:<9} {time.perf_counter() - started:6.2f} s  {outcome}")
    return outcome == "ok"


def _has_kernel(op: str) -> bool:
    """Return whether one of the op's functions runs a kernel on the current GPU."""
    arch = backends.arch_of(torch.device("cuda", torch.cuda.current_device()))
    functions = importlib.import_module(op_module(op)).__all__
    return dsa.backend() == "cute" and any(arch in backends.ARCHS.get(function, ()) for function in functions)
