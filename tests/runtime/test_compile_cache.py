"""The compile cache: what it compiles, loads, writes and refuses, in one process and in several."""

import dataclasses
import errno
import fcntl
import functools
import hashlib
import os
import platform
import pwd
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import cutlass
import cutlass.cute as cute
import pytest
import tvm_ffi

from dsa.runtime import compile_cache
from dsa.runtime.compile_cache import compile_sm90
from tests.kernels.cached_casts import (
    ARGS,
    DAMAGES,
    ORIGINAL,
    OTHER_ARGS,
    StubKernel,
    compiled_for,
    counted,
    objects,
    suffixes,
)

pytestmark = pytest.mark.usefixtures("directory")


def test_a_process_compiles_and_loads_a_variant_once(directory):
    get, compiled = counted()
    first = get(*ARGS)
    assert get(*ARGS) is first and compiled == [ARGS]
    assert get(*OTHER_ARGS) is not first and compiled == [ARGS, OTHER_ARGS]
    assert get(*ARGS) is first and len(objects(directory)) == 2


def test_threads_compile_once():
    def slow(*args):
        time.sleep(0.05)
        return StubKernel()

    get, compiled = counted(slow)
    with ThreadPoolExecutor(4) as threads:
        got = [*threads.map(lambda _: get(*ARGS), range(4))]
    assert len(compiled) == 1 and len(set(map(id, got))) == 1


def test_another_process_loads_the_file_without_a_lock(directory, monkeypatch):
    assert compiled_for(ARGS) == [ARGS]
    (path,) = objects(directory)
    assert path.name.startswith("per_token_cast_to_fp8-") and path.read_bytes().startswith(b"\x7fELF")
    monkeypatch.setattr(compile_cache, "_exclusive", None)
    assert compiled_for(ARGS, ARGS) == []


# This process compiles slowly, once its standard input ends. Two such processes would compile at the same time if they
# did not wait for each other.
PROCESS = """
import sys, time
from dsa.kernels.gemm import per_token_cast_to_fp8_sm90 as kernels

def compile_sm90(*args):
    print("compiling", flush=True)
    time.sleep(0.3)
    return original(*args)

original, kernels.compile_sm90 = kernels.compile_sm90, compile_sm90
print("ready", flush=True)
sys.stdin.read()
print(callable(kernels.compile_per_token_cast_to_fp8(*kernels.shipped_variants()[0][1])))
"""


def test_processes_compile_once_between_them(directory):
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PROCESS]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    for process in running:
        process.stdin.close()
    printed = sorted(process.stdout.read().split() for process in running)
    assert printed == [["True"], ["compiling", "True"]] and all(process.wait() == 0 for process in running)
    assert compiled_for(ARGS) == [] and len(objects(directory)) == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_compiled_again(directory, damage):
    compiled_for(ARGS)
    (path,) = objects(directory)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.warns(RuntimeWarning, match=rf"{path.name} cannot be loaded [\s\S]*compiling again"):
        assert compiled_for(ARGS) == [ARGS]
    assert objects(directory) == [path] and compiled_for(ARGS) == []


def test_a_file_that_is_no_kernel_is_removed(tmp_path):
    """The digest in the file's name is right, but the DSL cannot load the file."""
    content = b"not an object file"
    path = tmp_path / f"kernel.{hashlib.sha256(content).hexdigest()[:16]}.o"
    path.write_bytes(content)
    with pytest.warns(RuntimeWarning, match="cannot be loaded"):
        assert compile_cache._load(tmp_path, "kernel") is None
    assert not path.exists()


def test_no_reader_sees_half_a_file(directory):
    kernel = StubKernel()
    get, _ = counted(lambda *args: kernel)
    assert get(*ARGS) is kernel
    assert kernel.seen == [".lock", ".part"]
    (path,) = objects(directory)
    assert path.read_bytes() == b"first half, second half"
    assert suffixes(directory) == [".lock", ".o"]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (RuntimeError("no exporter\nfor this"), "RuntimeError: no exporter"),
        (AssertionError(), "AssertionError: "),
    ],
    ids=str,
)
def test_a_failed_export_costs_the_file_and_not_the_kernel(directory, error, said):
    kernel = StubKernel(error)
    get, compiled = counted(lambda *args: kernel)
    with pytest.warns(RuntimeWarning, match=rf"cannot be written to \({said}\); set DSA_CACHE_DIR") as warned:
        assert get(*ARGS) is kernel and get(*OTHER_ARGS) is kernel
    assert len(warned) == 1 and compiled == [ARGS, OTHER_ARGS]
    assert suffixes(directory) == [".lock", ".lock"]


def test_a_disk_that_became_read_only_costs_the_file_and_not_the_kernel(monkeypatch):
    refuse = mock.Mock(side_effect=OSError(errno.EROFS, "Read-only file system"))
    monkeypatch.setattr(compile_cache.tempfile, "mkstemp", refuse)
    monkeypatch.setattr(compile_cache, "open_lock", refuse)
    kernel = StubKernel()
    with pytest.warns(RuntimeWarning, match=r"cannot be written to \(Read-only file system\)"):
        assert counted(lambda *args: kernel)[0](*ARGS) is kernel


def test_an_interrupted_write_leaves_nothing_and_is_tried_again(directory):
    get, compiled = counted(lambda *args: StubKernel(KeyboardInterrupt() if len(compiled) == 1 else None))
    with pytest.raises(KeyboardInterrupt):
        get(*ARGS)
    assert suffixes(directory) == [".lock"]
    get(*ARGS)
    assert len(compiled) == 2 and len(objects(directory)) == 1


def test_a_file_system_without_locks(directory, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    assert compiled_for(ARGS) == [ARGS] and len(objects(directory)) == 1


def test_code_that_is_compiled_after_an_edit_is_not_kept(directory, monkeypatch):
    """The key can be that of the files before the edit, and the code that of the files after it. A later process would
    then load wrong code."""
    monkeypatch.setattr(compile_cache, "key_on_disk", lambda module: "another key")
    get, compiled = counted()
    with pytest.warns(RuntimeWarning, match="sources of dsa have changed since this process began"):
        assert get(*ARGS) is get(*ARGS)
    with pytest.raises(RuntimeError, match="sources of dsa have changed since this process began: start again"):
        compile_cache.fill(get, *ARGS)
    assert compile_cache.cubin(get, *ARGS).startswith(b"\x7fELF")
    assert compiled == [ARGS] * 3 and not objects(directory)


FORK = """
import fcntl, os, sys, threading
from pathlib import Path
from dsa.runtime import compile_cache

held, release = threading.Event(), threading.Event()

def hold():
    with compile_cache._compile_lock, compile_cache._exclusive(Path(sys.argv[1])):
        held.set()
        release.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    got = compile_cache._compile_lock.acquire(timeout=1)
    os.read(read, 1)  # until the parent has looked
    os._exit(0 if got else 3)
release.set()
thread.join()
handle = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("file lock: free")
except BlockingIOError:
    print("file lock: held")
os.close(write)
print("child:", os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.slow
def test_a_fork_while_a_thread_compiles(tmp_path):
    """The child can take the compile lock, although a thread of the parent held it during the fork. The parent's file
    lock is released, although the child has a copy of the lock file's descriptor."""
    command = [sys.executable, "-c", FORK, str(tmp_path / "kernel.lock")]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout
    assert printed == "file lock: free\nchild: 0\n"


def test_a_failed_compilation_is_not_kept(directory):
    get, compiled = counted(mock.Mock(side_effect=RuntimeError("spilled")))
    for call in (get, get, functools.partial(compile_cache.cubin, get)):
        with pytest.raises(RuntimeError, match="spilled"):
            call(*ARGS)
    assert len(compiled) == 3 and not objects(directory)


def test_an_empty_name_turns_the_disk_off(tmp_path, monkeypatch):
    monkeypatch.setenv("DSA_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    kernel = StubKernel()
    get, compiled = counted(lambda *args: kernel)
    assert get(*ARGS) is get(*ARGS) is kernel
    assert compiled == [ARGS] and kernel.seen is None and not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DSA_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match=r"file/cache is not used \(Not a directory\); set DSA_CACHE_DIR") as warned:
        assert compiled_for(ARGS, OTHER_ARGS, ARGS) == [ARGS, OTHER_ARGS]
    assert len(warned) == 1


def test_a_directory_that_can_only_be_read_is_read(directory, monkeypatch):
    compiled_for(ARGS)
    monkeypatch.setattr(compile_cache, "_writable", lambda directory: False)
    assert compiled_for(ARGS) == []
    with pytest.warns(RuntimeWarning, match="cache is not writable; set DSA_CACHE_DIR"):
        assert compiled_for(OTHER_ARGS) == [OTHER_ARGS]
    assert len(objects(directory)) == 1


def test_the_key_has_the_function_and_its_arguments():
    def another_function():
        pass

    another_function.__module__ = ORIGINAL.__module__
    (*others, config, scattered), key = ARGS, compile_cache._key(ORIGINAL, ARGS)
    equal, other = dataclasses.replace(config), dataclasses.replace(config, threads=2 * config.threads)
    assert compile_cache._key(ORIGINAL, (*others, equal, scattered)) == key
    assert compile_cache._key(ORIGINAL, (*others, other, scattered)) != key
    assert compile_cache._key(another_function, ARGS) != key


CHANGES = [
    (compile_cache, "source_key", lambda module: f"another key of {module}"),
    (cutlass, "__version__", "9.9"),
    (cutlass, "CUDA_VERSION", "12.9"),
    (tvm_ffi, "__version__", "9.9"),
    (compile_cache, "OPTIONS", "--opt-level 2"),
    (platform, "machine", lambda: "another architecture"),
    *((os.environ, f"CUTE_DSL_{name}", "1") for name in ("LINEINFO", "ENABLE_ASSERTIONS", "COMPILER_OPT")),
]
WITHOUT_EFFECT = [(os.environ, f"CUTE_DSL_{name}", "1") for name in ("ARCH", "CACHE_DIR", "LOG_LEVEL")]


@pytest.mark.parametrize(("owner", "name", "value"), CHANGES + WITHOUT_EFFECT)
def test_the_key_has_sources_versions_and_options_of_the_compiler(owner, name, value, monkeypatch):
    key = compile_cache._key(ORIGINAL, ARGS)
    change = monkeypatch.setitem if owner is os.environ else monkeypatch.setattr
    change(owner, name, value)
    assert (compile_cache._key(ORIGINAL, ARGS) != key) == ((owner, name, value) in CHANGES)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "/home/user"}, "/home/user/.cache/dsa"),
        ({"HOME": "/home/user", "XDG_CACHE_HOME": "/xdg"}, "/xdg/dsa"),
        ({"HOME": "/home/user", "XDG_CACHE_HOME": ""}, "/home/user/.cache/dsa"),
        ({"XDG_CACHE_HOME": "/xdg", "DSA_CACHE_DIR": "/kernels"}, "/kernels"),
        ({"HOME": "/home/user", "DSA_CACHE_DIR": "~/kernels"}, "/home/user/kernels"),
        ({"XDG_CACHE_HOME": "/xdg", "DSA_CACHE_DIR": ""}, None),
    ],
)
def test_where_the_directory_is(monkeypatch, environment, expected):
    for name in ("DSA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert compile_cache.cache_dir() == (expected and Path(expected))


@pytest.mark.parametrize("chosen", [None, "~/kernels"])
def test_a_user_without_a_home_has_a_directory_in_tmp(tmp_path, monkeypatch, chosen):
    """For example in a container, a user may have neither HOME nor an entry in the password file."""
    monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError("getpwuid(): uid not found")))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("HOME", "XDG_CACHE_HOME", "DSA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    if chosen is not None:
        monkeypatch.setenv("DSA_CACHE_DIR", chosen)
    directory = tmp_path / f"dsa-{os.geteuid()}"
    assert compile_cache.cache_dir() == directory
    assert compiled_for(ARGS) == [ARGS] and compiled_for(ARGS) == [] and len(objects(directory)) == 1


@cute.kernel
def _reverse_kernel(x: cute.Tensor, n: cutlass.Constexpr):
    """Read all n rows before the first write, so that each thread needs n registers."""
    thread, _, _ = cute.arch.thread_idx()
    rows = cute.make_rmem_tensor((n,), cutlass.Float32)
    for i in cutlass.range_constexpr(n):
        rows[i] = x[i, thread]
    cute.arch.sync_threads()
    for i in cutlass.range_constexpr(n):
        x[n - 1 - i, thread] = rows[i]


@cute.jit
def _reverse(x: cute.Tensor, n: cutlass.Constexpr, stream):
    _reverse_kernel(x, n).launch(grid=(1, 1, 1), block=(128, 1, 1), stream=stream)


def compile_reverse(n):
    x = cute.runtime.make_fake_tensor(cutlass.Float32, (n, 128), (128, 1), assumed_align=16)
    return compile_sm90(_reverse, x, n, cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True))


@pytest.mark.filterwarnings("ignore:This static loop")
def test_a_kernel_that_spills_does_not_compile():
    assert callable(compile_reverse(64))
    with pytest.raises(Exception, match="Registers are spilled to local memory"):
        compile_reverse(300)
