"""Digests of sources in the compile cache's folder: found there, replaced with the tree, and never believed from
others."""

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from dsa import source_digest as sources
from dsa.cute import kept_digests
from dsa.cute.kept_digests import kept_source_digest

pytestmark = pytest.mark.usefixtures("directory")
MODULE, OTHER = "dsa.ops.entry", "dsa.ops.other"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of two modules, `entry` and `other`. Call it as a new process begins, with {file: its new source}."""
    monkeypatch.setattr(sources, "_ROOT", tmp_path / "project")

    def begin(**files: str) -> None:
        for name, source in files.items():
            path = tmp_path / "project" / "dsa" / "ops" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        for function in (*caches, kept_source_digest, sources.digest_of_bytes):
            function.cache_clear()

    caches = [f for f in vars(sources).values() if hasattr(f, "cache_clear") and f is not sources.digest_of_bytes]
    begin(entry="LIMIT = 3\n", other="LIMIT = 4\n")
    yield begin
    begin()


@pytest.fixture
def computed(monkeypatch):
    """The modules whose digests were computed."""
    names = []
    monkeypatch.setattr(kept_digests, "source_digest", lambda name: names.append(name) or sources.source_digest(name))
    return names


def test_another_process_finds_them(directory, project, computed):
    first = [kept_source_digest(name, directory) for name in (MODULE, OTHER)]
    assert first == [sources.source_digest(name) for name in (MODULE, OTHER)] and computed == [MODULE, OTHER]
    project()
    assert [kept_source_digest(name, directory) for name in (MODULE, OTHER)] == first
    assert computed == [MODULE, OTHER]
    assert stat.S_IMODE((directory / "sources.json").stat().st_mode) == 0o600
    assert [path.name for path in directory.iterdir()] == ["sources.json"]


def test_any_change_of_the_tree_begins_anew(directory, project, computed):
    first = kept_source_digest(MODULE, directory)
    project(entry="LIMIT = 5\n")
    changed = kept_source_digest(MODULE, directory)
    assert changed == sources.source_digest(MODULE) != first
    project(other="LIMIT = 6\n")
    assert kept_source_digest(MODULE, directory) == changed
    project(another="")
    assert kept_source_digest(MODULE, directory) == changed
    assert computed == [MODULE] * 4
    (sources._ROOT / "dsa/ops/another.py").rename(sources._ROOT / "dsa/ops/renamed.py")
    project()
    kept_source_digest(MODULE, directory)
    assert computed == [MODULE] * 5


DAMAGE = ["", "[]", "{", "null", '{"tree": 1}', b"\xff\xfe"]


@pytest.mark.parametrize("content", DAMAGE)
def test_a_damaged_file_is_replaced(directory, project, computed, content):
    expected = kept_source_digest(MODULE, directory)
    path = directory / "sources.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    project()
    assert kept_source_digest(MODULE, directory) == expected and computed == [MODULE] * 2
    project()
    assert kept_source_digest(MODULE, directory) == expected and computed == [MODULE] * 2


@pytest.mark.parametrize("digest", ["", "g" * 16, 3, None, "0" * 17, ["0" * 16]])
def test_what_is_no_digest_is_not_taken(directory, project, computed, digest):
    expected = kept_source_digest(MODULE, directory)
    path = directory / "sources.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"digests": {MODULE: digest}}))
    project()
    assert kept_source_digest(MODULE, directory) == expected and computed == [MODULE] * 2


@pytest.mark.parametrize("how", ["writable", "link", "folder"])
def test_what_others_may_have_written_is_not_read(directory, project, computed, how, tmp_path):
    expected = kept_source_digest(MODULE, directory)
    path = directory / "sources.json"
    forged = json.loads(path.read_text()) | {"digests": {MODULE: "0" * 16}}
    path.write_text(json.dumps(forged))
    if how == "writable":
        path.chmod(0o666)
    elif how == "link":
        path.rename(tmp_path / "forged")
        path.symlink_to(tmp_path / "forged")
    else:
        directory.chmod(0o777)
    project()
    assert kept_source_digest(MODULE, directory) == expected and computed == [MODULE] * 2


@pytest.mark.parametrize("where", [None, "/proc/dsa", "/dev/null"])
def test_without_a_folder_the_sources_are_asked(project, where):
    directory = where and Path(where)
    assert kept_source_digest(MODULE, directory) == sources.source_digest(MODULE)


def test_a_full_disk_costs_nothing_but_time(directory, project, computed, monkeypatch):
    def full(*args):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "replace", full)
    assert kept_source_digest(MODULE, directory) == sources.source_digest(MODULE)
    assert list(directory.iterdir()) == []


def edit(name: str, source: str) -> None:
    """As somebody edits a file while a process runs."""
    path = sources._ROOT / "dsa" / "ops" / f"{name}.py"
    path.write_text(source)
    os.utime(path, ns=(1, 1))  # an edit within the clock's tick is one, too


def test_an_edit_behind_the_process_is_neither_read_nor_written(directory, project, computed):
    """Its digest of the tree is of before the edit, and a module's digest of behind it."""
    first = kept_source_digest(MODULE, directory)
    edit("other", "LIMIT = 5\n")
    new = kept_source_digest(OTHER, directory)
    project(other="LIMIT = 4\n")  # taken back
    assert kept_source_digest(OTHER, directory) == sources.source_digest(OTHER) != new
    assert kept_source_digest(MODULE, directory) == first
    edit("other", "LIMIT = 5\n")
    kept_source_digest.cache_clear()
    for function in (sources._tree, sources._module_text, sources.source_digest):
        function.cache_clear()
    assert kept_source_digest(OTHER, directory) == new  # and not what lies there of the source before


def test_which_edits_count(project):
    assert sources.unchanged() and sources.unchanged(MODULE)
    edit("other", "LIMIT = 5\n")
    assert not sources.unchanged() and sources.unchanged(MODULE) and not sources.unchanged(OTHER)
    (sources._ROOT / "dsa/ops/entry.py").unlink()
    assert not sources.unchanged(MODULE)
    project(entry="")
    assert sources.unchanged() and sources.unchanged(MODULE)
    edit("new", "")
    assert sources.unchanged() and sources.unchanged(MODULE) and not sources.unchanged("dsa.ops.new")


def test_a_link_that_an_editor_lays_beside_a_file(project):
    (sources._ROOT / "dsa/ops/.#entry.py").symlink_to("somebody@host.1:2")
    sources.digest_of_bytes()
    project()
    assert sources.unchanged() and sources.unchanged(MODULE)


def test_edits_count_from_the_import_of_dsa_on(tmp_path):
    """A kernel's limits are in memory before anything asks for a digest."""
    shutil.copytree(Path(sources.__file__).parent, tmp_path / "dsa", ignore=shutil.ignore_patterns("__pycache__"))
    script = """
import dsa
from dsa.kernels.moe import limits
with open(limits.__file__, "a") as file:
    file.write("MAX_TOP_K = 16\\n")
from dsa.source_digest import unchanged
assert not unchanged() and not unchanged("dsa.kernels.moe.limits")
assert unchanged("dsa.kernels.gemm.limits")
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, env={**os.environ, "PYTHONPATH": "."})
