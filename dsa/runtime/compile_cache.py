"""Compiled kernels, kept in memory and on disk.

A kernel module decorates every `compile_*` function with `@cached`. The arguments of these functions are strings (such
as names of dtypes), ints, bools, tuples of ints, and frozen dataclasses of these. The first call with some arguments in
a process looks for an object file under the key of this kernel (see Key), first on disk (loading takes about a
millisecond), then in the package (some 50 ms). If there is none, the call compiles the kernel, which takes seconds, and
writes the file.

Key: the bytes of the Python files in the kernel's family folder and in dsa/cute, the compile function's name and
arguments, the compile options, the versions of the DSL, CUDA tools and TVM-FFI, the DSL's settings in the environment,
and the host's architecture. The two folders suffice, because kernels import nothing else that affects their code. A
change of a comment changes the key too, because compiling again costs less than finding out which bytes of a file
matter. The key does not contain the Python version and the CPU model: an object file does not depend on Python, and its
host code runs on every CPU of the architecture. So a cache that was filled on one machine serves another. If a family's
sources change while a process runs, the process no longer writes kernels of this family, because the key can belong to
the old files and the code to the new ones.

Package: a wheel contains an archive compiled/MODULE.tar.xz per kernel module, with the object files of the module's
shipped variants under the names that they have in the cache. `python -m dsa.runtime.pack` writes these
archives. An editable install has none.

Safety: an object file is native code, so it is loaded only if no other user can have written it. The cache's folder and
its missing parents are created with mode 0700. The folder is used only if it belongs to this user and neither its group
nor others may write to it. Then only this user can add, rename or replace files in the folder. A user who may rename
the folder itself could put another folder in its place. Therefore a parent folder that everyone may write to is
accepted only with the sticky bit, as on /tmp, which prevents users from renaming the files of others. The owner or the
group of a parent folder can still rename the cache's folder at any time, e.g. under sudo, where root's HOME can be
another user's. So a file is opened once, and the DSL, which opens files by their paths, gets the path of the open
descriptor. The DSL thus loads the file that was checked, and writes to the file that was created. Symbolic links in the
folder's path are resolved once, before all checks.

If a file cannot be read, a warning is issued and the kernel is compiled. If a file cannot be written, a warning is
issued and the compiled kernel is not kept.

quack-kernels has a similar cache. It is not used here, because it requires einops and a torch extension, and because
its key covers the sources of quack-kernels, so any change of quack-kernels would recompile everything here.

Environment: DSA_CACHE_DIR is the directory (default: $XDG_CACHE_HOME/dsa or ~/.cache/dsa; for a user without a home
$TMPDIR/dsa-<uid>). If it is set and empty, no cache is used: kernels are loaded from the package's archives or
compiled, and are not kept.
"""

import contextlib
import fcntl
import functools
import hashlib
import io
import lzma
import os
import platform
import stat
import sys
import tarfile
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import cutlass
import cutlass.cute as cute
import tvm_ffi

from dsa.runtime import variants
from dsa.runtime.object_file import cubin_in, write_object_file
from dsa.runtime.recorded_calls import noted
from dsa.runtime.variants import Kernel, Variant

# The variants that a kernel module ships: (compile function, arguments) each.
Variants = list[tuple[Callable[..., Any], tuple]]
OPTIONS = "--enable-tvm-ffi --ptxas-options '--warn-on-spills --warning-as-error'"
_ENTRY = "dsa_kernel"
_EDITED = "sources of dsa have changed since this process began"
_ADVICE = "set DSA_CACHE_DIR to keep kernels from one process to the next"
# Prefixes (after CUTE_DSL_) of the DSL's settings that do not change the compiled code. `compile_for` sets the arch
# itself.
_HARMLESS = ("ARCH", "CACHE_DIR", "DUMP_DIR", "FILTER_STACKTRACE", "KEEP", "LOG_", "PRINT_", "SHOW_STACKTRACE")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_SHARED = Path(__file__).resolve().parent.parent / "cute"
PACKED = Path(__file__).parent.parent / "compiled"  # the folder of a wheel's archives of compiled kernels
_compile_lock = threading.RLock()  # cute.compile is not thread-safe
_warned: set[str] = set()


def _new_lock() -> None:
    """Make a new lock after a fork, because the old one may be held by a thread that does not exist in the child."""
    global _compile_lock
    _compile_lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


def cache_dir() -> Path | None:
    """Return the directory of the object files; None if DSA_CACHE_DIR is set and empty."""
    chosen = os.environ.get("DSA_CACHE_DIR")
    if chosen == "":
        return None
    try:
        if chosen is not None:
            return Path(chosen).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsa"
    except RuntimeError:  # neither HOME nor an entry in the password file
        return Path(os.environ.get("TMPDIR") or "/tmp") / f"dsa-{os.geteuid()}"


def compile_for(target: str, function: Callable, *args: Any) -> Any:
    """Compile for a target of ptxas, such as "sm_90a", with a TVM-FFI interface. If the kernel spills registers,
    compilation fails.

    `args` are fake tensors, numbers, None for absent tensors, and a fake stream. The result is called with torch
    tensors, numbers and None, without a stream.
    """
    return cute.compile(function, *args, options=f"--gpu-arch {target} {OPTIONS}")


def compile_sm90(function: Callable, *args: Any) -> Any:
    return compile_for("sm_90a", function, *args)


def cached(compile_function: Callable) -> Callable:
    """Cache a compile function's results by its positional arguments, in memory and on disk.

    While a call of an op is recorded (`recorded_calls`), each launch of a kernel that the decorated function returned
    is added to the steps of the recorded call.
    """
    memory: dict[tuple, Kernel] = {}
    source_key(compile_function.__module__)  # computed now, before the family's files can change

    @functools.wraps(compile_function)
    def get(*args: Any) -> Kernel:
        if variants.stand_in is not None:
            return variants.stand_in(Variant(compile_function.__module__, compile_function.__name__, args))
        kernel = memory.get(args)
        if kernel is not None:
            return kernel
        with _compile_lock:
            if args not in memory:
                memory[args] = noted(_load_or_compile(compile_function, args))
            return memory[args]

    return get


def fill(compile_function: Callable, *args: Any) -> bool:
    """Write the result of a `@cached` compile function to disk. Return whether it was compiled: False if it was on disk
    or in the package.

    Nothing is loaded, so no GPU is needed. Raises OSError if the folder cannot be used, and RuntimeError if the
    kernel's sources have changed since this process began.
    """
    function, directory = compile_function.__wrapped__, cache_dir()
    if directory is None:
        raise OSError("DSA_CACHE_DIR is empty: compiled kernels are not kept")
    try:
        directory = private_folder(directory)
    except OSError as error:
        raise OSError(error.errno, _of(error), str(directory)) from None
    stem = _stem(function, args)
    with _compile_lock, _exclusive(directory / f"{stem}.lock"):
        if (found := _find(directory, stem)) is not None:
            found[1].close()
            return False
        if (content := packed_object(function.__module__, stem)) is not None:
            _write(directory, stem, lambda file: file.write(content))
            return False
        kernel = function(*args)
        if _edited(function):
            raise RuntimeError(f"{_EDITED}: start again")
        _write(directory, stem, _export(kernel))
        return True


def is_on_disk(compile_function: Callable, *args: Any) -> bool:
    """Whether `fill` would find the kernel's object file on disk."""
    directory = cache_dir()
    try:
        directory = None if directory is None else private_folder(directory)
    except OSError:
        return False
    found = None if directory is None else _find(directory, stem_of(compile_function, args))
    if found is not None:
        found[1].close()
    return found is not None


def cubin(compile_function: Callable, *args: Any) -> bytes:
    """Return the cubin of the kernel that a `@cached` compile function compiles for these arguments."""
    return cubin_in(object_file(compile_function, *args))


def stem_of(compile_function: Callable, args: tuple) -> str:
    """Return the stem of the name of the kernel's object file: the name is STEM.<digest of the file's bytes>.o."""
    return _stem(compile_function.__wrapped__, args)


def object_file(compile_function: Callable, *args: Any) -> bytes:
    """Return the object file of a `@cached` compile function's kernel, from the cache or compiled. The package's
    archives are not used. The compiled kernel is not kept without a writable cache, or if its sources have changed
    since this process began."""
    function = compile_function.__wrapped__
    stem = _stem(function, args)
    with _compile_lock, contextlib.ExitStack() as stack:
        directory = _usable_directory()
        if directory is None or not _writable(directory):
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        stack.enter_context(_exclusive(directory / f"{stem}.lock"))
        found = _find(directory, stem)
        if found is None:
            kernel = function(*args)
            if _edited(function):
                directory = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
            content = _write(directory, stem, _export(kernel))
        else:
            with found[1] as file:
                content = file.read()
    return content


def _load_or_compile(compile_function: Callable, args: tuple) -> Any:
    directory, stem = _usable_directory(), _stem(compile_function, args)
    if directory is not None and (kernel := _load(directory, stem)) is not None:
        return kernel
    if directory is None or not _writable(directory):
        packed = _load_packed(compile_function, stem)
        if packed is not None:
            return packed[0]
        if directory is not None:
            _warn_once(f"the compile cache {directory} is not writable; {_ADVICE}")
        return compile_function(*args)
    with _exclusive(directory / f"{stem}.lock"):
        if (kernel := _load(directory, stem)) is not None:
            return kernel
        packed = _load_packed(compile_function, stem)
        if packed is not None:
            kernel, content = packed
            _keep(directory, stem, lambda file: file.write(content))
            return kernel
        kernel = compile_function(*args)
        if _edited(compile_function):
            _warn_once(f"{_EDITED}: kernels that it compiles are not kept")
        else:
            _keep(directory, stem, _export(kernel))
        return kernel


def _load_packed(function: Callable, stem: str) -> tuple[Any, bytes] | None:
    """Return the kernel from the package and its object file; None if there is none, or if it cannot be loaded."""
    content = packed_object(function.__module__, stem)
    if content is None:
        return None
    try:
        with open(os.memfd_create("dsa"), "w+b") as file:
            file.write(content)
            file.flush()
            return cute.runtime.load_module(str(path_of(file)), enable_tvm_ffi=True)[_ENTRY], content
    except Exception as error:  # the DSL may raise any exception
        _warn_once(f"kernels that came with the package cannot be loaded ({_of(error)}); compiling")
        return None


def _keep(directory: Path, stem: str, write: Callable[[BinaryIO], Any]) -> None:
    try:
        _write(directory, stem, write)
    except Exception as error:  # an exception of the disk or of the DSL's exporter
        _warn_once(f"the compile cache {directory} cannot be written to ({_of(error)}); {_ADVICE}")


def _usable_directory() -> Path | None:
    """Return the cache's folder. None: the cache is off, or `private_folder` refuses the folder."""
    directory = cache_dir()
    if directory is None:
        return None
    try:
        return private_folder(directory)
    except OSError as error:
        _warn_once(f"the compile cache {directory} is not used ({_of(error)}); {_ADVICE}")
        return None


def _writable(directory: Path) -> bool:
    return os.access(directory, os.W_OK)


def _stem(function: Callable, args: tuple) -> str:
    return f"{function.__name__.removeprefix('compile_')}-{_key(function, args)}"


def _key(function: Callable, args: tuple) -> str:
    tools = (cutlass.__version__, str(cutlass.CUDA_VERSION), tvm_ffi.__version__, OPTIONS, platform.machine())
    sources = source_key(function.__module__)
    text = repr((function.__module__, function.__qualname__, args, sources, tools, _settings()))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _edited(function: Callable) -> bool:
    return key_on_disk(function.__module__) != source_key(function.__module__)


def _settings() -> list[tuple[str, str]]:
    """Return the DSL's environment variables that affect the compiled code."""
    prefix = "CUTE_DSL_"
    return sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(prefix) and not name.removeprefix(prefix).startswith(_HARMLESS)
    )


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold an advisory lock, so that of several processes that start together only one compiles a kernel. The lock ends
    with the block, or with the process if that ends first.

    If no lock is possible (a full disk, a file system without locks), all of the processes compile, which is harmless.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            handle = open_lock(path)
            stack.callback(_release, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _release(handle: int) -> None:
    """Unlock the file explicitly before closing it: a forked child has a copy of the descriptor, which would otherwise
    hold the lock as long as the child lives."""
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def _find(directory: Path, stem: str) -> tuple[Path, BinaryIO] | None:
    """Return the path of the object file STEM.<digest of the bytes>.o and the open file; None if there is none.

    A file that another user may have written is removed. So is a file whose bytes do not match the digest in its name,
    because loading a damaged file would crash the process rather than raise an error.
    """
    for path in directory.glob(f"{stem}.*.o"):
        try:
            file = open_private_file(path)
            content = file.read()
        except FileNotFoundError:  # another process has removed it
            continue
        except OSError as error:
            _remove(path, _of(error))
            continue
        if path.name == name_of(stem, content):
            file.seek(0)
            return path, file
        file.close()
        _remove(path, "it is damaged")
    return None


def _load(directory: Path, stem: str) -> Any:
    """Return the kernel from disk, if it is there. A file that cannot be loaded is removed with a warning."""
    found = _find(directory, stem)
    if found is None:
        return None
    path, file = found
    with file:
        try:
            return cute.runtime.load_module(str(path_of(file)), enable_tvm_ffi=True)[_ENTRY]
        except Exception as error:
            _remove(path, _of(error))
            return None


def _remove(path: Path, reason: str) -> None:
    warnings.warn(f"dsa: {path} cannot be loaded ({reason}); compiling again", RuntimeWarning, stacklevel=2)
    with contextlib.suppress(OSError):
        path.unlink()


def _write(directory: Path, stem: str, write: Callable[[BinaryIO], Any]) -> bytes:
    """Create the object file that `write` writes, and return its bytes. The file gets its name after it is complete, so
    that no process reads a partial file."""
    file, partial = create_private_file(directory, f"{stem}.")
    try:
        with file:
            write(file)
            file.seek(0)
            content = file.read()
        os.replace(partial, directory / name_of(stem, content))
        return content
    finally:
        partial.unlink(missing_ok=True)


def _export(kernel: Any) -> Callable[[BinaryIO], None]:
    return lambda file: write_object_file(kernel, path_of(file), _ENTRY)


def _warn_once(text: str) -> None:
    """Warn once per process, because the same problem may concern dozens of kernels."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(f"dsa: {text}", RuntimeWarning, stacklevel=2)


def _of(error: Exception) -> str:
    """Return the message of an OSError; for other errors the type and the first line of the message."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


@functools.cache
def source_key(module: str) -> str:
    """Return the key of an imported kernel module's sources, as they were at the first call in this process."""
    return key_on_disk(module)


def key_on_disk(module: str) -> str:
    """Return the key of an imported kernel module's sources, as they are now."""
    return folder_key(Path(sys.modules[module].__file__).resolve().parent)


def folder_key(family: Path) -> str:
    """Return a SHA-256 digest (16 hex digits) of the paths and bytes of the Python files in `family` and in
    dsa/cute."""
    digest = hashlib.sha256()
    for folder in (family, _SHARED):
        for path in sorted(filter(Path.is_file, folder.rglob("*.py"))):  # skips broken links, such as locks of editors
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def private_folder(directory: Path) -> Path:
    """Return `directory` with links resolved, and create it if it is missing."""
    missing, existing = [], directory
    while not (existing.exists() or existing.is_symlink()):
        missing.append(existing)
        existing = existing.parent
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    directory = Path(os.path.realpath(directory, strict=True))  # Path.resolve raises no OSError for a loop of links
    if not directory.is_dir():
        raise NotADirectoryError(f"{directory} is not a folder")
    for above in directory.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(f"everyone may rename what is in {above}: chmod +t {above}")
    _check_private("folder", directory, directory.stat())
    return directory


def open_private_file(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError unless only this user can have written it."""
    # Without O_NONBLOCK, opening a pipe without a writer would block. For regular files the flag has no effect.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError("it is not a regular file")
        _check_private("file", path, status)
    except OSError:
        os.close(handle)
        raise
    return open(handle, "rb")


def create_private_file(directory: Path, prefix: str) -> tuple[BinaryIO, Path]:
    """Create an empty file with mode 0600 under a new name. Return it, open for writing and reading, and its path."""
    handle, path = tempfile.mkstemp(prefix=prefix, suffix=".part", dir=directory)
    return open(handle, "w+b"), Path(path)


def path_of(file: BinaryIO) -> Path:
    """Return a path that leads to this open file, even if another file is now at the path where it was opened."""
    return Path(f"/proc/self/fd/{file.fileno()}")


def open_lock(path: Path) -> int:
    """Return a descriptor of the file. Raises OSError for a link."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _check_private(what: str, path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(f"the {what} belongs to user {status.st_uid} and not to {os.geteuid()}")
    if status.st_mode & _OTHERS_WRITE:
        raise PermissionError(f"other users may write to the {what}: chmod go-w {path}")


def packed_object(module: str, stem: str) -> bytes | None:
    """Return the object file of a kernel of `module`; None if the package does not contain it."""
    return _read(archive_of(PACKED, module)).get(stem)


def archive_of(folder: Path, module: str) -> Path:
    return folder / f"{module.rpartition('.')[2]}.tar.xz"


def name_of(stem: str, content: bytes) -> str:
    """Return the name of an object file in the compile cache and in an archive."""
    return f"{stem}.{hashlib.sha256(content).hexdigest()[:16]}.o"


def write_archive(path: Path, objects: Mapping[str, bytes]) -> None:
    """Write an archive of {stem: object file}. Its bytes depend only on `objects`, not on their order or the time."""
    with lzma.open(path, "wb", preset=6) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
        for stem, content in sorted(objects.items()):
            member = tarfile.TarInfo(name_of(stem, content))
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def read_archive(path: Path) -> dict[str, bytes]:
    """Return {stem: object file}. A damaged archive raises OSError, LZMAError, TarError or ValueError."""
    with lzma.open(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        return dict(_checked(archive))


def _checked(archive: Iterable[tarfile.TarInfo]) -> Iterable[tuple[str, bytes]]:
    for member in archive:
        content = archive.extractfile(member).read()
        stem = member.name.split(".")[0]
        if member.name != name_of(stem, content):
            raise ValueError(f"{member.name} does not have its bytes")
        yield stem, content


# A process usually asks for several variants of a module in a row. The largest module takes some 12 MB.
@functools.lru_cache(maxsize=1)
def _read(path: Path) -> Mapping[str, bytes]:
    try:
        return read_archive(path)
    except FileNotFoundError:
        return {}
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError, ValueError) as error:
        warnings.warn(f"dsa: {path} cannot be read ({error}); compiling", RuntimeWarning, stacklevel=2)
        return {}
