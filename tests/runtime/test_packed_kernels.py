"""Kernels that come with the package are loaded instead of compiled."""

import warnings
from unittest import mock

import pytest

from dsa.runtime import compile_cache
from dsa.runtime.compile_cache import archive_of, fill, object_file, packed_object, read_archive, stem_of, write_archive
from dsa.runtime.pack import pack
from tests.kernels.cached_casts import (
    ARGS,
    DAMAGES,
    OTHER_ARGS,
    StubKernel,
    compiled_for,
    counted,
    kernels,
    objects,
)

MODULE = kernels.__name__
COMPILE = kernels.compile_per_token_cast_to_fp8


@pytest.fixture(scope="module")
def content():
    return object_file(COMPILE, *ARGS)


@pytest.fixture
def archive(content, directory, tmp_path, monkeypatch):
    """Return the package's only archive, which contains only the variant with ARGS. The cache is empty."""
    path = archive_of(tmp_path / "compiled", MODULE)
    path.parent.mkdir()
    write_archive(path, {stem_of(COMPILE, ARGS): content})
    monkeypatch.setattr(compile_cache, "PACKED", path.parent)
    return path


def assert_compiled(arguments):
    get, compiled = counted(lambda *args: StubKernel())
    assert isinstance(get(*arguments), StubKernel) and compiled == [arguments]


def test_a_packed_kernel_is_loaded_and_kept_in_the_cache(archive, directory):
    assert compiled_for(ARGS) == []
    (kept,) = objects(directory)
    assert kept.read_bytes() == packed_object(MODULE, stem_of(COMPILE, ARGS))
    archive.unlink()
    assert compiled_for(ARGS) == []


@pytest.mark.parametrize(("arguments", "version"), [(OTHER_ARGS, None), (ARGS, "0.0.0")])
def test_other_variants_and_those_of_other_versions_are_compiled(archive, arguments, version, monkeypatch):
    monkeypatch.setattr(compile_cache.tvm_ffi, "__version__", version or compile_cache.tvm_ffi.__version__)
    assert_compiled(arguments)


@pytest.mark.parametrize("state", ["off", "read-only", "full"])
def test_a_packed_kernel_needs_no_cache(archive, directory, state, monkeypatch):
    if state == "off":
        monkeypatch.setenv("DSA_CACHE_DIR", "")
    elif state == "read-only":
        monkeypatch.setattr(compile_cache, "_writable", lambda directory: False)
    else:
        monkeypatch.setattr(
            compile_cache, "create_private_file", mock.Mock(side_effect=OSError(28, "No space left on device"))
        )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert compiled_for(ARGS) == []
    assert len(said) == (state == "full") and objects(directory) == []


def test_fill_takes_the_packed_kernel(archive, directory, monkeypatch):
    monkeypatch.setattr(kernels, "compile_sm90", None)
    assert fill(COMPILE, *ARGS) is False
    assert len(objects(directory)) == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_archive_costs_a_warning_and_the_compilation(archive, damage):
    archive.write_bytes(DAMAGES[damage](archive.read_bytes()))
    with pytest.warns(RuntimeWarning, match=rf"{archive.name} cannot be read"):
        assert_compiled(ARGS)


def test_a_damaged_object_costs_a_warning_and_the_compilation(archive, content, monkeypatch):
    """The object's name in the archive contains the digest of the content before the damage."""
    name_of = compile_cache.name_of
    with monkeypatch.context() as patch:
        patch.setattr(compile_cache, "name_of", lambda stem, _: name_of(stem, content))
        write_archive(archive, {stem_of(COMPILE, ARGS): content[:-1] + b"!"})
    with pytest.warns(RuntimeWarning, match=rf"{archive.name} cannot be read"):
        assert_compiled(ARGS)


def test_an_object_that_the_dsl_cannot_load_is_compiled(archive):
    write_archive(archive, {stem_of(COMPILE, ARGS): b"no object file"})
    with pytest.warns(RuntimeWarning, match="came with the package cannot be loaded"):
        assert_compiled(ARGS)


@pytest.mark.slow
def test_pack_adds_all_shipped_variants_to_an_archive(tmp_path):
    path = archive_of(tmp_path, MODULE)
    write_archive(path, {"of_other_versions-0": b"object"})
    assert list(pack(tmp_path, [MODULE], 1)) == [path]
    first, found = path.read_bytes(), read_archive(path)
    expected = {stem_of(function, args) for function, args in kernels.shipped_variants()}
    assert found.keys() == expected | {"of_other_versions-0"}
    list(pack(tmp_path, [MODULE], 1))
    assert path.read_bytes() == first
