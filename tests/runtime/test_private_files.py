"""What the compile cache loads and writes: nothing that another user may have written, nothing through a link."""

import os
import stat

import cutlass.cute as cute
import pytest

from dsa.runtime import compile_cache, private_files
from tests.kernels.cached_casts import ARGS, ORIGINAL, OTHER_ARGS, StubKernel, counted, objects

pytestmark = pytest.mark.usefixtures("directory")


def anothers(monkeypatch):
    """Files, which are looked at by their descriptors, seem to belong to somebody else."""
    fstat = os.fstat

    def of_another(handle):
        status = list(fstat(handle))
        status[stat.ST_UID] += 1
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", of_another)


def linked(path):
    """The same bytes, but behind a link."""
    kept = path.parent.parent / "kept.o"
    path.rename(kept)
    path.symlink_to(kept)


DISTRUSTED = {
    "writable by the group": (lambda path, patch: path.chmod(0o660), "other users may write to the file"),
    "writable by all": (lambda path, patch: path.chmod(0o606), "other users may write to the file"),
    "another's": (lambda path, patch: anothers(patch), f"the file belongs to user {os.geteuid() + 1} and not to"),
    "a link": (lambda path, patch: linked(path), "symbolic links"),
}


@pytest.mark.parametrize(("change", "said"), DISTRUSTED.values(), ids=DISTRUSTED)
def test_a_file_that_others_may_have_written_is_replaced(directory, monkeypatch, change, said):
    counted()[0](*ARGS)
    (path,) = objects(directory)
    loaded, load_module = [], cute.runtime.load_module
    monkeypatch.setattr(cute.runtime, "load_module", lambda *a, **k: loaded.append(a) or load_module(*a, **k))
    get, compiled = counted()
    with monkeypatch.context() as patch:
        change(path, patch)
        with pytest.warns(RuntimeWarning, match=rf"{path.name} cannot be loaded [\s\S]*{said}[\s\S]*compiling again"):
            get(*ARGS)
    assert compiled == [ARGS] and not loaded
    assert objects(directory) == [path] and stat.S_ISREG(path.lstat().st_mode) and path.stat().st_mode & 0o777 == 0o600
    get, compiled = counted()
    get(*ARGS)
    assert compiled == [] and len(loaded) == 1


def test_a_folder_that_others_may_write_to_is_neither_read_nor_written(directory):
    counted()[0](*ARGS)
    directory.chmod(0o770)
    before = sorted(directory.iterdir())
    get, compiled = counted()
    with pytest.warns(
        RuntimeWarning, match=r"other users may write to the folder: chmod go-w .*cache\); set"
    ) as warned:
        get(*ARGS)
        get(*OTHER_ARGS)
    assert compiled == [ARGS, OTHER_ARGS] and len(warned) == 1 and sorted(directory.iterdir()) == before
    directory.chmod(0o755)
    get, compiled = counted()
    get(*ARGS)
    assert compiled == []


def test_links_in_the_place_of_new_files_are_not_followed(directory, tmp_path, monkeypatch):
    """A lock that is a link is done without; a file's name is one that is not there."""
    directory.mkdir(mode=0o700)
    stem = compile_cache._stem(ORIGINAL, ARGS)
    (directory / f"{stem}.lock").symlink_to(tmp_path / "lock")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (directory / f"{stem}.taken.part").symlink_to(victim)
    monkeypatch.setattr(private_files.tempfile, "_get_candidate_names", lambda: iter(["taken", "free"]))
    get, compiled = counted()
    get(*ARGS)
    assert compiled == [ARGS] and len(objects(directory)) == 1
    assert not (tmp_path / "lock").exists() and victim.read_text() == "precious"


def swapped(directory, **files):
    """Whoever may rename what is in the folder above puts another folder there, with files of these names."""
    directory.rename(directory.with_name("ours"))
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)


def test_what_was_checked_is_what_is_loaded(directory, monkeypatch):
    counted()[0](*ARGS)
    (path,) = objects(directory)
    load_module = cute.runtime.load_module

    def load(*args, **kwargs):
        swapped(directory, **{path.name: b"another's code"})
        return load_module(*args, **kwargs)

    monkeypatch.setattr(cute.runtime, "load_module", load)
    get, compiled = counted()
    assert callable(get(*ARGS)) and compiled == []


def test_what_is_written_goes_into_the_file_that_was_created(directory, monkeypatch):
    written = []

    def write(kernel, path, entry):
        (partial,) = directory.glob("*.part")
        swapped(directory, **{partial.name: b"precious"})
        path.write_bytes(b"a kernel")
        written.append((directory / partial.name).read_bytes())

    monkeypatch.setattr(compile_cache, "write_object_file", write)
    counted(lambda *args: StubKernel())[0](*ARGS)
    assert written == [b"precious"]


def test_what_is_written_is_ours_alone(directory):
    before = os.umask(0)
    try:
        counted()[0](*ARGS)
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


def test_folders_are_created_for_us_alone(tmp_path):
    before = os.umask(0)
    try:
        folder = private_files.private_folder(tmp_path / "new" / "cache")
    finally:
        os.umask(before)
    assert folder == tmp_path / "new" / "cache"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("mode", [0o700, 0o500, 0o755, 0o711])
def test_folders_that_only_we_write_to_are_used(tmp_path, mode):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    assert private_files.private_folder(folder) == folder and folder.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o707, 0o702, 0o777, 0o1777])
def test_folders_that_others_may_write_to_are_refused(tmp_path, mode):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(PermissionError, match=f"other users may write to the folder: chmod go-w {folder}"):
        private_files.private_folder(folder)


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(PermissionError, match=f"the folder belongs to user {uid} and not to {uid + 1}"):
        private_files.private_folder(tmp_path)


@pytest.mark.parametrize("between", [(), ("another",)])
def test_a_folder_that_everyone_may_rename_is_refused(tmp_path, between):
    above = tmp_path / "above"
    folder = above.joinpath(*between, "cache")
    folder.mkdir(mode=0o700, parents=True)
    folder.parent.chmod(0o755)  # whatever the umask is
    above.chmod(0o777)
    with pytest.raises(PermissionError, match=rf"everyone may rename what is in {above}: chmod \+t {above}"):
        private_files.private_folder(folder)
    for mode in (0o1777, 0o775, 0o755):  # as /tmp; the user's own group, where the umask is 002
        above.chmod(mode)
        assert private_files.private_folder(folder) == folder


def test_links_to_a_folder_are_followed_before_it_is_checked(tmp_path):
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir(mode=0o700)
    link.symlink_to(folder)
    assert private_files.private_folder(link) == folder
    assert private_files.private_folder(link / "cache") == folder / "cache"
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match=f"other users may write to the folder: chmod go-w {folder}"):
        private_files.private_folder(link)
    with pytest.raises(PermissionError, match=f"everyone may rename what is in {folder}"):
        private_files.private_folder(link / "cache")


def test_what_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("file", "file/cache", "nowhere", "nowhere/cache", "loop"):
        with pytest.raises(OSError):
            private_files.private_folder(tmp_path / name)
    assert not (tmp_path / "missing").exists()


def test_what_is_no_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")  # which would wait for somebody to write to it
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(PermissionError, match="it is not a regular file"):
            private_files.open_private_file(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        private_files.open_private_file(tmp_path / "missing")
