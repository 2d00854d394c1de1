"""A kernel's source key depends on all files that the kernel can import, and on no others."""

import shutil
from pathlib import Path

import pytest

import dsa.cute
import dsa.kernels
from dsa.runtime import compile_cache

KERNELS, CUTE = Path(dsa.kernels.__path__[0]), Path(dsa.cute.__path__[0])


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """Return a folder with copies of two families of kernels and of dsa/cute. The compile cache uses this copy of
    dsa/cute."""
    for family in ("moe", "mla"):
        shutil.copytree(KERNELS / family, tmp_path / family)
    shutil.copytree(CUTE, tmp_path / "cute")
    monkeypatch.setattr(compile_cache, "_SHARED", tmp_path / "cute")
    return tmp_path


def append_a_line(path):
    path.write_text(path.read_text() + "\n")


@pytest.mark.parametrize(
    ("file", "change", "changed"),
    [
        ("moe/limits.py", append_a_line, {"moe"}),
        ("mla/mla_plan_sm90.py", append_a_line, {"mla"}),
        ("cute/pipeline.py", append_a_line, {"moe", "mla"}),
        ("moe/new.py", Path.touch, {"moe"}),
        ("moe/limits.py", lambda path: path.rename(path.with_name("renamed.py")), {"moe"}),
    ],
)
def test_a_change_changes_the_keys_of_the_kernels_that_can_import_it(copy, file, change, changed):
    before = {family: compile_cache.folder_key(copy / family) for family in ("moe", "mla")}
    change(copy / file)
    after = {family: compile_cache.folder_key(copy / family) for family in before}
    assert {family for family in before if before[family] != after[family]} == changed


def test_files_that_python_and_editors_write_do_not_count(copy):
    key = compile_cache.folder_key(copy / "moe")
    (copy / "moe" / ".#limits.py").symlink_to("somebody@somewhere")
    (copy / "moe" / "__pycache__").mkdir(exist_ok=True)
    (copy / "moe" / "__pycache__" / "limits.cpython-311.pyc").write_bytes(b"code")
    assert compile_cache.folder_key(copy / "moe") == key
