"""The compile cache does not load files that another user may have written, and does not write through links."""

import os
import stat

import cutlass.cute as cute
import pytest

from dsa.runtime import compile_cache
from tests.kernels.cached_casts import ARGS, ORIGINAL, OTHER_ARGS, StubKernel, compiled_for, counted, objects

pytestmark = pytest.mark.usefixtures("directory")


def owned_by_another(monkeypatch):
    fstat = os.fstat

    def of_another(handle):
        status = list(fstat(handle))
        status[stat.ST_UID] += 1
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", of_another)


def linked(path):
    kept = path.parent.parent / "kept.o"
    path.rename(kept)
    path.symlink_to(kept)


DISTRUSTED = {
    "writable by the group": (lambda path, patch: path.chmod(0o660), "other users may write to the file"),
    "writable by all": (lambda path, patch: path.chmod(0o606), "other users may write to the file"),
    "another's": (
        lambda path, patch: owned_by_another(patch),
        f"the file belongs to user {os.geteuid() + 1} and not to",
    ),
    "a link": (lambda path, patch: linked(path), "symbolic links"),
}


@pytest.mark.parametrize(("change", "said"), DISTRUSTED.values(), ids=DISTRUSTED)
def test_a_file_that_others_may_have_written_is_replaced(directory, monkeypatch, change, said):
    compiled_for(ARGS)
    (path,) = objects(directory)
    loaded, load_module = [], cute.runtime.load_module
    monkeypatch.setattr(cute.runtime, "load_module", lambda *a, **k: loaded.append(a) or load_module(*a, **k))
    message = rf"{path.name} cannot be loaded [\s\S]*{said}[\s\S]*compiling again"
    with monkeypatch.context() as patch, pytest.warns(RuntimeWarning, match=message):
        change(path, patch)
        assert compiled_for(ARGS) == [ARGS] and not loaded
    assert objects(directory) == [path] and stat.S_ISREG(path.lstat().st_mode) and mode_of(path) == 0o600
    assert compiled_for(ARGS) == [] and len(loaded) == 1


def mode_of(path):
    return path.stat().st_mode & 0o7777


def test_a_folder_that_others_may_write_to_is_neither_read_nor_written(directory):
    compiled_for(ARGS)
    directory.chmod(0o770)
    before = sorted(directory.iterdir())
    message = r"other users may write to the folder: chmod go-w .*cache\); set"
    with pytest.warns(RuntimeWarning, match=message) as warned:
        assert compiled_for(ARGS, OTHER_ARGS) == [ARGS, OTHER_ARGS]
    assert len(warned) == 1 and sorted(directory.iterdir()) == before
    directory.chmod(0o755)
    assert compiled_for(ARGS) == []


def test_links_in_the_place_of_new_files_are_not_followed(directory, tmp_path, monkeypatch):
    """If the lock file is a link, the cache compiles without a lock."""
    directory.mkdir(mode=0o700)
    stem = compile_cache._stem(ORIGINAL, ARGS)
    (directory / f"{stem}.lock").symlink_to(tmp_path / "lock")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (directory / f"{stem}.taken.part").symlink_to(victim)
    monkeypatch.setattr(compile_cache.tempfile, "_get_candidate_names", lambda: iter(["taken", "free"]))
    assert compiled_for(ARGS) == [ARGS] and len(objects(directory)) == 1
    assert not (tmp_path / "lock").exists() and victim.read_text() == "precious"


def swapped(directory, **files):
    """Replace the cache's folder. A user who may rename entries of the parent folder could do this."""
    directory.rename(directory.with_name("ours"))
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)


def test_the_file_that_was_checked_is_loaded(directory, monkeypatch):
    compiled_for(ARGS)
    (path,) = objects(directory)
    load_module = cute.runtime.load_module

    def load(*args, **kwargs):
        swapped(directory, **{path.name: b"another's code"})
        return load_module(*args, **kwargs)

    monkeypatch.setattr(cute.runtime, "load_module", load)
    assert compiled_for(ARGS) == []


def test_a_kernel_is_written_to_the_file_that_was_created(directory, monkeypatch):
    written = []

    def write(kernel, path, entry):
        (partial,) = directory.glob("*.part")
        swapped(directory, **{partial.name: b"precious"})
        path.write_bytes(b"a kernel")
        written.append((directory / partial.name).read_bytes())

    monkeypatch.setattr(compile_cache, "write_object_file", write)
    counted(lambda *args: StubKernel())[0](*ARGS)
    assert written == [b"precious"]


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_only_we_may_access_new_files(directory, no_umask):
    compiled_for(ARGS)
    assert mode_of(directory) == 0o700 and {mode_of(path) for path in directory.iterdir()} == {0o600}


def test_only_we_may_access_new_folders(tmp_path, no_umask):
    folder = compile_cache.private_folder(tmp_path / "new" / "cache")
    assert folder == tmp_path / "new" / "cache" and mode_of(folder) == mode_of(folder.parent) == 0o700


@pytest.mark.parametrize("mode", [0o700, 0o500, 0o755, 0o711])
def test_folders_that_only_we_may_write_to_are_used(tmp_path, mode):
    tmp_path.chmod(mode)
    assert compile_cache.private_folder(tmp_path) == tmp_path and mode_of(tmp_path) == mode


def assert_refused(message, folder):
    with pytest.raises(PermissionError, match=message):
        compile_cache.private_folder(folder)


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o707, 0o702, 0o777, 0o1777])
def test_folders_that_others_may_write_to_are_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    assert_refused(f"other users may write to the folder: chmod go-w {tmp_path}", tmp_path)


def test_a_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    assert_refused(f"the folder belongs to user {uid} and not to {uid + 1}", tmp_path)


@pytest.mark.parametrize("between", [(), ("another",)])
def test_a_folder_that_everyone_may_rename_is_refused(tmp_path, between):
    above = tmp_path / "above"
    folder = above.joinpath(*between, "cache")
    folder.mkdir(mode=0o700, parents=True)
    folder.parent.chmod(0o755)  # independent of the umask
    above.chmod(0o777)
    assert_refused(rf"everyone may rename what is in {above}: chmod \+t {above}", folder)
    for mode in (0o1777, 0o775, 0o755):  # as /tmp; with umask 002; with umask 022
        above.chmod(mode)
        assert compile_cache.private_folder(folder) == folder


def test_links_to_a_folder_are_followed_before_it_is_checked(tmp_path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir(mode=0o700)
    link.symlink_to(folder)
    assert compile_cache.private_folder(link) == folder
    assert compile_cache.private_folder(link / "cache") == folder / "cache"
    folder.chmod(0o777)
    assert_refused(f"other users may write to the folder: chmod go-w {folder}", link)
    assert_refused(f"everyone may rename what is in {folder}", link / "cache")


@pytest.mark.parametrize("name", ["file", "file/cache", "nowhere", "nowhere/cache", "loop"])
def test_files_and_broken_links_are_no_folders(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(OSError):
        compile_cache.private_folder(tmp_path / name)
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("name", "error"), [("pipe", PermissionError), ("folder", PermissionError), ("missing", FileNotFoundError)]
)
def test_only_regular_files_are_read(tmp_path, name, error):
    os.mkfifo(tmp_path / "pipe")  # opening it for reading would block
    (tmp_path / "folder").mkdir()
    with pytest.raises(error, match="No such file" if name == "missing" else "it is not a regular file"):
        compile_cache.open_private_file(tmp_path / name)
