"""The compile cache: what is compiled, loaded, written and refused, in one process and between several."""

import dataclasses
import errno
import fcntl
import functools
import hashlib
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import pytest
import tvm_ffi

from dsa.cute import compile_cache
from dsa.cute.compile_cache import cached, compile_sm90, cubin
from dsa.kernels import per_token_cast_to_fp8_sm90 as kernels

ORIGINAL = kernels.compile_per_token_cast_to_fp8.__wrapped__
ARGS = kernels.shipped_variants()[0][1]
OTHER_ARGS = kernels.shipped_variants()[-1][1]


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("DSA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def counted(compile_function=ORIGINAL):
    """A new cache in front of the FP8 cast's compile function, and the list of what it then really compiles."""
    compiled = []

    @functools.wraps(ORIGINAL)
    def counting(*args):
        compiled.append(args)
        return compile_function(*args)

    return cached(counting), compiled


class StubKernel:
    """Writes its object file in two halves and looks at the directory in between."""

    def __init__(self, fails_with=None):
        self.fails_with = fails_with
        self.seen = None

    def export_to_c(self, object_file_path, function_name):
        with open(object_file_path, "wb") as file:
            file.write(b"first half,")
            file.flush()
            self.seen = [path.suffix for path in Path(object_file_path).parent.iterdir()]
            if self.fails_with is not None:
                raise self.fails_with
            file.write(b" second half")


def objects(directory):
    return sorted(directory.glob("*.o"))


def test_memory(directory):
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
    got = []
    threads = [threading.Thread(target=lambda: got.append(get(*ARGS))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1 and len(got) == 4 and len(set(map(id, got))) == 1


def test_a_file_holds_the_kernel(directory, monkeypatch):
    get, compiled = counted()
    get(*ARGS)
    (path,) = objects(directory)
    assert path.name.startswith("per_token_cast_to_fp8-") and path.read_bytes().startswith(b"\x7fELF")
    monkeypatch.setattr(compile_cache, "_exclusive", None)  # a reader never waits
    again, compiled_again = counted()
    loaded = again(*ARGS)
    assert callable(loaded) and again(*ARGS) is loaded
    assert compiled == [ARGS] and compiled_again == []


# Compiles once the standard input ends, slowly enough that processes which do not wait for each other overlap.
PROCESS = """
import sys, time
from dsa.kernels import per_token_cast_to_fp8_sm90 as kernels

def compile_sm90(*args):
    print("compiling", flush=True)
    time.sleep(0.3)
    return original(*args)

original, kernels.compile_sm90 = kernels.compile_sm90, compile_sm90
print("ready", flush=True)
sys.stdin.read()
print(callable(kernels.compile_per_token_cast_to_fp8(*kernels.shipped_variants()[0][1])))
"""


def processes(count):
    """What `count` processes that start together print."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", PROCESS]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    for process in running:
        assert process.stdout.readline() == "ready\n"
    for process in running:
        process.stdin.close()
    printed = [process.stdout.read().split() for process in running]
    assert all(process.wait() == 0 for process in running)
    return printed


def test_processes_compile_once_between_them(directory):
    assert sorted(processes(2)) == [["True"], ["compiling", "True"]]
    get, compiled = counted()
    get(*ARGS)
    assert compiled == [] and len(objects(directory)) == 1


@pytest.mark.parametrize("damage", ["empty", "half", "noise", "one byte"])
def test_a_damaged_file_is_compiled_again(directory, damage):
    counted()[0](*ARGS)
    (path,) = objects(directory)
    whole = path.read_bytes()
    half = len(whole) // 2
    flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]  # an object file still, and another kernel
    path.write_bytes({"empty": b"", "half": whole[:half], "noise": b"no object file", "one byte": flipped}[damage])
    get, compiled = counted()
    with pytest.warns(RuntimeWarning, match=rf"{path.name} cannot be loaded [\s\S]*compiling again"):
        get(*ARGS)
    assert compiled == [ARGS] and objects(directory) == [path]
    get, compiled = counted()
    get(*ARGS)
    assert compiled == []


def test_a_file_that_is_no_kernel_is_removed(tmp_path):
    """Whole, but not what the DSL can load: from another of its builds, say."""
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
    assert sorted(kernel.seen) == [".lock", ".part"]
    (path,) = objects(directory)
    assert path.read_bytes() == b"first half, second half"
    assert sorted(p.suffix for p in directory.iterdir()) == [".lock", ".o"]


def test_a_full_disk_costs_the_file_and_not_the_kernel(directory):
    kernel = StubKernel(OSError(errno.ENOSPC, "No space left on device"))
    get, _ = counted(lambda *args: kernel)
    with pytest.warns(RuntimeWarning, match=r"cannot be written to \(.*No space left on device\)"):
        assert get(*ARGS) is kernel
    assert [p.suffix for p in directory.iterdir()] == [".lock"]


def test_an_interrupted_write_leaves_nothing_and_is_tried_again(directory):
    get, compiled = counted(lambda *args: StubKernel(KeyboardInterrupt() if len(compiled) == 1 else None))
    with pytest.raises(KeyboardInterrupt):
        get(*ARGS)
    assert [p.suffix for p in directory.iterdir()] == [".lock"]
    get(*ARGS)
    assert len(compiled) == 2 and len(objects(directory)) == 1


def test_a_file_system_without_locks(directory, monkeypatch):
    def flock(handle, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    get, compiled = counted(lambda *args: StubKernel())
    get(*ARGS)
    assert compiled == [ARGS] and len(objects(directory)) == 1


def test_a_failed_compilation_is_not_kept(directory):
    def fail(*args):
        raise RuntimeError("spilled")

    get, compiled = counted(fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="spilled"):
            get(*ARGS)
    assert len(compiled) == 2 and not objects(directory)


def test_the_disk_can_be_turned_off(tmp_path, monkeypatch):
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
    get, compiled = counted()
    with pytest.warns(RuntimeWarning, match="file/cache is not writable; set DSA_CACHE_DIR") as warned:
        kernel = get(*ARGS)
    assert get(*ARGS) is kernel and compiled == [ARGS] and len(warned) == 1


def test_a_directory_that_can_only_be_read_is_read(directory, monkeypatch):
    counted()[0](*ARGS)
    monkeypatch.setattr(compile_cache, "_writable", lambda directory: False)
    get, compiled = counted()
    get(*ARGS)
    assert compiled == []


def test_the_key_covers_what_is_compiled(monkeypatch):
    config = ARGS[-1]
    other_config = dataclasses.replace(config, threads=config.threads * 2)
    keys = [compile_cache._key(ORIGINAL, ARGS), compile_cache._key(ORIGINAL, (*ARGS[:-1], other_config))]
    assert compile_cache._key(ORIGINAL, (*ARGS[:-1], dataclasses.replace(config))) == keys[0]

    def another_function():
        pass

    another_function.__module__ = ORIGINAL.__module__
    keys.append(compile_cache._key(another_function, ARGS))
    for owner, name, value in (
        (compile_cache, "source_digest", lambda module: f"another digest of {module}"),
        (cutlass, "__version__", "9.9"),
        (tvm_ffi, "__version__", "9.9"),
        (compile_cache, "sys", SimpleNamespace(version_info=(3, 99, 0))),
        (compile_cache, "ARCH", "sm_100a"),
        (compile_cache, "_host", lambda: "another CPU"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            keys.append(compile_cache._key(ORIGINAL, ARGS))
    assert len(set(keys)) == len(keys) == 9
    assert compile_cache._key(ORIGINAL, ARGS) == keys[0]


def test_the_key_covers_the_source_of_the_kernel_and_of_no_other_module(monkeypatch):
    asked = []
    monkeypatch.setattr(compile_cache, "source_digest", lambda module: asked.append(module) or "digest")
    compile_cache._key(ORIGINAL, ARGS)
    assert asked == ["dsa.kernels.per_token_cast_to_fp8_sm90"]


def test_the_host_is_named_with_its_instruction_sets():
    host = compile_cache._host()
    assert host.startswith(platform.machine())
    if platform.machine() == "x86_64" and os.path.exists("/proc/cpuinfo"):
        assert " sse2 " in host


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


@cute.kernel
def _reverse_kernel(x: cute.Tensor, n: cutlass.Constexpr):
    """All n rows are read before the first is written: each thread holds n registers."""
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


def test_cubin_is_compiled_anew_and_not_cached(directory):
    get, compiled = counted()
    code = cubin(get, *ARGS)
    assert code.startswith(b"\x7fELF") and cubin(get, *ARGS) == code
    assert len(compiled) == 2 and not directory.exists() and compile_cache._dump_dir is None

    def fail(*args):
        raise RuntimeError("spilled")

    with pytest.raises(RuntimeError, match="spilled"):
        cubin(counted(fail)[0], *ARGS)
    assert compile_cache._dump_dir is None
