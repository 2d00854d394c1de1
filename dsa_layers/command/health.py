"""`dsa check`: what is installed, what the ops will run on, and whether they compute the right thing here."""

import importlib
import importlib.metadata
import os
import platform
import time
import warnings
from collections.abc import Iterable

import torch

import dsa
from dsa.cases import check_op
from dsa.ops import op_module, op_modules
from dsa.runtime import backends

_PACKAGES = ("dsa-kernels", "torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python", "safetensors", "tokenizers")


def check(seeds: int = 1) -> bool:
    """Print the report; True if every op passed, each with the random numbers of that many seeds."""
    print(f"python {platform.python_version()}")
    for package, version in versions(_PACKAGES).items():
        print(f"{package} {version or 'not installed'}")
    on_gpu = torch.cuda.is_available()
    print(f"GPU: {torch.cuda.get_device_name() if on_gpu else 'none'}")
    reason = backends.why_no_kernels()
    print(f"backend: {dsa.backend()}" + (f" ({reason})" if reason else ""))
    print(f"compile cache: {_cache_state()}")
    device = "cuda" if on_gpu else "cpu"
    passed = [_run(name, device, seeds) for name in op_modules()]
    print(f"{sum(passed)} of {len(passed)} ops passed")
    return all(passed)


def versions(packages: Iterable[str] = _PACKAGES) -> dict[str, str | None]:
    """{package: its version, or None where it is not installed}."""
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _has_kernel(op: str) -> bool:
    """Whether one of the op's functions has a kernel for the current GPU."""
    arch = backends.arch_of(torch.device("cuda", torch.cuda.current_device()))
    functions = importlib.import_module(op_module(op)).__all__
    return any(arch in backends.ARCHS.get(function, ()) for function in functions)


def _cache_state() -> str:
    try:
        from dsa.runtime.compile_cache import cache_dir, private_folder
    except ImportError as error:
        return f"unavailable ({error})"
    directory = cache_dir()
    if directory is None:
        return "off (DSA_CACHE_DIR is empty)"
    kernels, size, state = [], 0, ""
    try:
        existing = next(path for path in (directory, *directory.parents) if path.exists())
        kernels = list(directory.glob("*.o"))
        size = sum(path.stat().st_size for path in kernels)
        if not (existing.is_dir() and os.access(existing, os.W_OK)):
            state = ", not writable: every process compiles again"
        if existing == directory:
            private_folder(directory)
    except OSError as error:  # also where the folder cannot be looked at
        state = f", not used ({error.strerror or error}): every process compiles again"
    return f"{directory}, {len(kernels)} kernels, {size / 1e6:.1f} MB{state}"


def _run(name: str, device: str, seeds: int) -> bool:
    started = time.perf_counter()
    outcome = "ok"
    for seed in range(seeds):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about ops without a kernel: the column below says it
                check_op(name, device, seed)
        except Exception as error:
            outcome = f"FAILED{f' with seed {seed}' if seed else ''}: {type(error).__name__}: {error}"
            break
    how = "kernel" if device == "cuda" and dsa.backend() == "cute" and _has_kernel(name) else "reference"
    print(f"  {name:<28} {how:<9} {time.perf_counter() - started:6.2f} s  {outcome}")
    return outcome == "ok"
