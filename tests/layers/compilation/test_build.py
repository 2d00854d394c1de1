"""Compiling variants in processes of their own, into a folder."""

import os
import re

import pytest

from dsa.kernels.moe.sort_by_expert_sm90 import compile_sort_by_expert
from dsa.ops.asked_variants import Variant
from dsa.runtime.compile_cache import fill
from dsa_layers.compilation import build as module
from dsa_layers.compilation.build import build, described

SORT = "dsa.kernels.moe.sort_by_expert_sm90"
VARIANTS = [Variant(SORT, "compile_sort_by_expert", (dtype,)) for dtype in ("int32", "int64")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A compile cache; not that of this process."""
    monkeypatch.setenv("DSA_CACHE_DIR", str(tmp_path / "other"))
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o700)
    return directory


def test_a_folder_that_is_filled(folder, tmp_path, monkeypatch):
    assert sorted(build(VARIANTS, folder, 2)) == [(variant, True) for variant in VARIANTS]
    names = sorted(path.name for path in folder.glob("*.o"))
    assert len(names) == 2 and all(name.startswith("sort_by_expert-") for name in names)
    assert sorted(build(VARIANTS, folder, 1)) == [(variant, False) for variant in VARIANTS]
    with monkeypatch.context() as patch:
        patch.setattr(module, "_compile", None)  # nobody is asked to
        assert sorted(build(VARIANTS, folder, 64)) == [(variant, False) for variant in VARIANTS]
    damaged = folder / names[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert sorted(is_new for _, is_new in build(VARIANTS, folder, 2)) == [False, True]
    assert sorted(path.name for path in folder.glob("*.o")) == names and not (tmp_path / "other").exists()
    monkeypatch.setenv("DSA_CACHE_DIR", str(folder))
    assert fill(compile_sort_by_expert, "int64") is False  # under the key that ops look for
    assert callable(compile_sort_by_expert("int64")) and len([*folder.glob("*.o")]) == 2


def test_a_variant_that_does_not_compile_is_named(folder):
    wrong = Variant(SORT, "compile_sort_by_expert", ("int63",))
    assert described(wrong) == "compile_sort_by_expert('int63')"
    with pytest.raises(RuntimeError, match=re.escape(described(wrong)) + " does not compile: KeyError: "):
        list(build([wrong], folder, 1))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(folder):
    folder.chmod(0o500)
    with pytest.raises(OSError, match="Permission denied"):
        list(build(VARIANTS[:1], folder, 1))


def test_a_folder_of_others(folder):
    folder.chmod(0o777)
    with pytest.raises(OSError, match="other users may write to the folder"):
        list(build(VARIANTS[:1], folder, 1))
