"""Nobody is told that a kernel works on a GPU when that code never ran there."""

import shutil

import pytest

from dsa.source_digest import _tree
from tests.gpu import receipt, status_table


@pytest.mark.parametrize("name", receipt.ops_with_kernels())
def test_every_kernel_has_gpu_tests_and_a_receipt(name):
    names = [n for n in receipt.tested_ops() if receipt.op_module(n) == f"dsa.ops.{name}"]
    assert names, f"dsa.ops.{name} has a kernel and no tests/gpu/test_{name}.py"
    for n in names:
        assert n in receipt.load()["ops"], f"{n}: run `python -m tests.gpu.run {n}` on a Hopper GPU"


@pytest.mark.parametrize("name", receipt.load()["ops"])
def test_receipt_is_of_this_code(name):
    entry = receipt.load()["ops"][name]
    if entry["unverified"]:
        return
    assert entry["digest"] == receipt.digest(name), f"{name}: run `python -m tests.gpu.run {name}` on a Hopper GPU"
    assert entry["tests"] > 0 and entry["failed"] == 0


def test_generation_has_a_receipt_that_a_layer_or_an_op_ends(tmp_path, monkeypatch):
    entry = receipt.load()["ops"][receipt.GENERATION]
    assert entry["tests"] > 0 and not entry["failed"]
    layers = shutil.copytree(receipt.LAYERS, tmp_path / "layers")
    monkeypatch.setattr(receipt, "LAYERS", layers)
    digest = receipt.digest(receipt.GENERATION)
    for path, changes in (("cli.py", False), ("generation.py", True), ("layers/norm.py", True)):
        (layers / path).write_text((layers / path).read_text() + "\nNEW = 1\n")
        _tree.cache_clear()
        assert (receipt.digest(receipt.GENERATION) != digest) is changes
        digest = receipt.digest(receipt.GENERATION)
    monkeypatch.setattr(receipt, "source_digest", lambda module: "0" * 16)
    assert receipt.digest(receipt.GENERATION) != digest


def test_status_table_of_the_readme_is_generated():
    text = status_table.README.read_text()
    assert status_table.inserted(text) == text, "run `python -m tests.gpu.status_table`"


def test_a_changed_digest_is_noticed(monkeypatch):
    (name, *_) = receipt.load()["ops"]
    monkeypatch.setattr(receipt, "digest", lambda name: "0" * 16)
    with pytest.raises(AssertionError, match=r"tests\.gpu\.run"):
        test_receipt_is_of_this_code(name)
