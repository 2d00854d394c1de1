"""Compiled kernels, kept in memory and on disk.

A kernel module decorates each of its `compile_*` functions, whose arguments are only dtypes, ints, bools and frozen
dataclasses of these, with `@cached`. The first call in a process loads an object file (about a millisecond) if one was
written under the same key, else it compiles (seconds) and writes one. The key covers the kernel's source and that of
the helpers it imports, the arguments, the versions of the DSL, of TVM-FFI and of Python, and the host's CPU.

Why not quack-kernels' cache, which is close to this one: it requires einops and a torch extension, and its key covers
that package's sources rather than one kernel's, so that any change there would recompile everything here.

Environment: DSA_CACHE_DIR moves the directory (default $XDG_CACHE_HOME/dsa or ~/.cache/dsa); empty turns the disk off.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import tvm_ffi

from dsa.source_digest import source_digest

ARCH = "sm_90a"
_ENTRY = "dsa_kernel"
_compile_lock = threading.RLock()  # cute.compile is not thread-safe
_dump_dir: Path | None = None


def cache_dir() -> Path | None:
    """The directory of the object files, or None when DSA_CACHE_DIR is set and empty."""
    chosen = os.environ.get("DSA_CACHE_DIR")
    if chosen is not None:
        return Path(chosen).expanduser() if chosen else None
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsa"


def compile_sm90(function: Callable, *args: Any) -> Any:
    """cute.compile for sm_90a behind TVM-FFI; a kernel that spills registers does not compile.

    Arguments are fake tensors, ints and a fake stream. The result is called with torch tensors and ints.
    """
    options = f"--gpu-arch {ARCH} --enable-tvm-ffi --ptxas-options '--warn-on-spills --warning-as-error'"
    if _dump_dir is not None:
        options += f" --keep-cubin --dump-dir {_dump_dir}"
    return cute.compile(function, *args, options=options)


def cubin(compile_function: Callable, *args: Any) -> bytes:
    """The machine code that a `@cached` compile function gives for these arguments; always compiles anew."""
    global _dump_dir
    with _compile_lock, tempfile.TemporaryDirectory() as directory:
        _dump_dir = Path(directory)
        try:
            return compile_function.__wrapped__(*args).artifacts.CUBIN
        finally:
            _dump_dir = None


@functools.cache
def _host() -> str:
    """The CPU's architecture and instruction sets: the host code in an object file uses those of its builder."""
    flags = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags}"


def _key(function: Callable, args: tuple) -> str:
    versions = (cutlass.__version__, tvm_ffi.__version__, sys.version_info[:2], ARCH, _host())
    text = repr((function.__module__, function.__qualname__, args, source_digest(function.__module__), versions))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold an advisory lock, so that processes which start together compile a kernel once. It dies with its holder.

    Where it cannot be had (a full disk, a file system without locks), all of them compile, which is harmless.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            fcntl.flock(stack.enter_context(open(path, "w")), fcntl.LOCK_EX)
        yield


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _load(directory: Path, stem: str) -> Any:
    """The kernel in the object file `stem`.<digest of its bytes>.o, or None if there is none.

    A file whose bytes are not those of its name would crash the process rather than fail to load: it is removed.
    """
    for path in directory.glob(f"{stem}.*.o"):
        problem = "it is damaged"
        try:
            if path.suffixes[-2] == f".{_digest(path)}":
                return cute.runtime.load_module(str(path), enable_tvm_ffi=True)[_ENTRY]
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        warnings.warn(f"dsa: {path} cannot be loaded ({problem}); compiling again", RuntimeWarning, stacklevel=2)
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def _load_or_compile(compile_function: Callable, args: tuple, directory: Path) -> Any:
    stem = f"{compile_function.__name__.removeprefix('compile_')}-{_key(compile_function, args)}"
    if (kernel := _load(directory, stem)) is not None:
        return kernel
    if not _writable(directory):
        warnings.warn(
            f"dsa: the compile cache {directory} is not writable; set DSA_CACHE_DIR to keep kernels from one process "
            "to the next",
            RuntimeWarning,
            stacklevel=3,
        )
        return compile_function(*args)
    with _exclusive(directory / f"{stem}.lock"):
        if (kernel := _load(directory, stem)) is not None:
            return kernel
        kernel = compile_function(*args)
        # A reader must never see half a file: write beside it and rename.
        partial = directory / f"{stem}.{os.getpid()}.part"
        try:
            kernel.export_to_c(object_file_path=str(partial), function_name=_ENTRY)
            os.replace(partial, directory / f"{stem}.{_digest(partial)}.o")
        except OSError as error:
            warnings.warn(f"dsa: {directory} cannot be written to ({error})", RuntimeWarning, stacklevel=2)
        finally:
            partial.unlink(missing_ok=True)
        return kernel


def cached(compile_function: Callable) -> Callable:
    """Cache a compile function's results by its positional arguments, in memory and on disk."""
    memory: dict[tuple, Any] = {}

    @functools.wraps(compile_function)
    def get(*args: Any) -> Any:
        kernel = memory.get(args)
        if kernel is not None:
            return kernel
        with _compile_lock:
            if args not in memory:
                directory = cache_dir()
                memory[args] = (
                    compile_function(*args)
                    if directory is None
                    else _load_or_compile(compile_function, args, directory)
                )
            return memory[args]

    return get


def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)
