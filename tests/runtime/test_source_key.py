"""A kernel's key covers all that it can import, and nothing else."""

import shutil
from pathlib import Path

import pytest

import dsa.cute
import dsa.kernels
from dsa.runtime import source_key

KERNELS, CUTE = Path(dsa.kernels.__path__[0]), Path(dsa.cute.__path__[0])


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of two families and of dsa/cute."""
    for family in ("moe", "mla"):
        shutil.copytree(KERNELS / family, tmp_path / family)
    shutil.copytree(CUTE, tmp_path / "cute")
    monkeypatch.setattr(source_key, "_SHARED", tmp_path / "cute")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "changed"),
    [("moe/limits.py", {"moe"}), ("mla/mla_plan_sm90.py", {"mla"}), ("cute/pipeline.py", {"moe", "mla"})],
)
def test_a_byte_changes_the_keys_of_the_kernels_that_can_import_it(copy, file, changed):
    before = {family: source_key.folder_key(copy / family) for family in ("moe", "mla")}
    (copy / file).write_text((copy / file).read_text() + "\n")
    after = {family: source_key.folder_key(copy / family) for family in before}
    assert {family for family in before if before[family] != after[family]} == changed


def test_new_and_renamed_files_change_the_key(copy):
    keys = [source_key.folder_key(copy / "moe")]
    (copy / "moe" / "new.py").write_text("")
    keys.append(source_key.folder_key(copy / "moe"))
    (copy / "moe" / "new.py").rename(copy / "moe" / "newer.py")
    keys.append(source_key.folder_key(copy / "moe"))
    assert len(set(keys)) == 3


def test_what_python_and_editors_write_does_not_count(copy):
    key = source_key.folder_key(copy / "moe")
    (copy / "moe" / ".#limits.py").symlink_to("somebody@somewhere")
    (copy / "moe" / "__pycache__").mkdir(exist_ok=True)
    (copy / "moe" / "__pycache__" / "limits.cpython-311.pyc").write_bytes(b"code")
    assert source_key.folder_key(copy / "moe") == key
