"""Compiling variants in processes of their own, into a folder."""

import os

import pytest

from dsa.kernels.moe.sort_by_expert_sm90 import compile_sort_by_expert
from dsa.runtime.build import build
from dsa.runtime.compile_cache import fill
from dsa.runtime.variants import Variant

SORT = "dsa.kernels.moe.sort_by_expert_sm90"
VARIANTS = [Variant(SORT, "compile_sort_by_expert", (dtype,)) for dtype in ("int32", "int64")]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A compile cache; not that of this process."""
    monkeypatch.setenv("DSA_CACHE_DIR", str(tmp_path / "other"))
    directory = tmp_path / "kernels"
    directory.mkdir(mode=0o700)
    return directory


def names(folder):
    return sorted(path.name for path in folder.glob("*.o"))


@pytest.mark.slow
def test_a_folder_that_is_filled(folder, tmp_path, monkeypatch):
    assert sorted(build(VARIANTS, folder, 2)) == [(variant, True) for variant in VARIANTS]
    made = names(folder)
    assert len(made) == 2 and all(name.startswith("sort_by_expert-") for name in made)
    assert sorted(build(VARIANTS, folder, 2)) == [(variant, False) for variant in VARIANTS]
    damaged = folder / made[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert sorted(is_new for _, is_new in build(VARIANTS, folder, 1)) == [False, True]
    assert names(folder) == made and not (tmp_path / "other").exists()
    monkeypatch.setenv("DSA_CACHE_DIR", str(folder))
    assert fill(compile_sort_by_expert, "int64") is False  # under the key that ops look for


WRONG = Variant(SORT, "compile_sort_by_expert", ("int63",))
MAY_WRITE_EVERYWHERE = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


@pytest.mark.parametrize(
    ("variant", "mode", "message"),
    [
        (WRONG, 0o700, r"^compile_sort_by_expert\('int63'\) does not compile: KeyError: "),
        pytest.param(VARIANTS[0], 0o777, "other users may write to the folder", marks=pytest.mark.slow),
        pytest.param(VARIANTS[0], 0o500, "Permission denied", marks=[MAY_WRITE_EVERYWHERE, pytest.mark.slow]),
    ],
)
def test_what_cannot_be_compiled_or_kept_is_an_error(folder, variant, mode, message):
    folder.chmod(mode)
    with pytest.raises(RuntimeError, match=message):
        list(build([variant], folder, 1))
