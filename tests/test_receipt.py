"""Nobody is told that a kernel works on a GPU when that code never ran there, or was never judged by these tests."""

import re
import shutil

import pytest

from dsa import backends, source_digest
from dsa_bench.e2e import document
from dsa_bench.harness import case
from tests.gpu import receipt

ARCH = "sm_90"


def entries():
    return receipt.load()[ARCH]


@pytest.mark.parametrize(("name", "arch"), receipt.ops_with_kernels())
def test_every_kernel_has_gpu_tests(name, arch):
    names = [
        n
        for n in set(receipt.tested()) - receipt.WHOLES.keys()
        if receipt.op_module(n) == source_digest.op_module(name)
    ]
    assert names, f"{source_digest.op_module(name)} has a kernel and no test_{name}.py in tests/gpu"


@pytest.mark.parametrize("arch", backends.archs())
def test_every_test_on_a_gpu_is_an_entry(arch):
    assert receipt.load()[arch].keys() == set(receipt.tested()), f"run `python -m tests.gpu.run` on a GPU of {arch}"


@pytest.mark.parametrize("arch", backends.archs())
@pytest.mark.parametrize("name", receipt.tested())
def test_receipt_is_of_this_code(name, arch):
    entry = receipt.load()[arch][name]
    if entry["unverified"]:
        return
    assert entry["digest"] == receipt.digest(name, arch), (
        f"{name}: run `python -m tests.gpu.run {name}` on a Hopper GPU"
    )
    assert entry["tests"] > 0 or not receipt.test_files(name)
    assert entry["failed"] == 0
    assert entry["bench"] or not (name == "e2e" or name in case.benchmarks())
    assert re.fullmatch(r"[0-9a-f]{12,40}", entry["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", entry["date"]) and "H200" in entry["device"]


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of this project. Call it with a file, what to replace there and by what."""
    for package in ("dsa", "dsa_layers", "dsa_bench", "tests", "docs"):
        leave = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.png", "*.json")
        shutil.copytree(receipt.ROOT / package, tmp_path / package, ignore=leave)
    for folder in ("dsa/tuned", "dsa_layers/vendored"):
        shutil.copytree(receipt.ROOT / folder, tmp_path / folder, dirs_exist_ok=True)
    shutil.copy(receipt.ROOT / "README.md", tmp_path)
    monkeypatch.setattr(source_digest, "_ROOT", tmp_path)
    monkeypatch.setattr(receipt, "ROOT", tmp_path)
    monkeypatch.setattr(receipt, "HERE", tmp_path / "tests" / "gpu")
    monkeypatch.setattr(receipt, "TUNED", tmp_path / "dsa" / "tuned")
    monkeypatch.setattr(receipt, "LAYERS", tmp_path / "dsa_layers")

    def clear():
        for function in (source_digest._tree, source_digest._module_text, source_digest.modules_used_by):
            function.cache_clear()

    def change(file, old, new):
        path = tmp_path / file
        assert old in path.read_text(), f"{file} has no {old!r}"
        path.write_text(path.read_text().replace(old, new))
        clear()

    clear()
    yield change
    clear()


# What is changed, and entries that this ends and does not end.
CHANGES = {
    "a kernel": (
        ("dsa/kernels/elementwise/rms_norm_sm90.py", "import cutlass\n", "import cutlass\nNEW = 1\n"),
        ("rms_norm", "generation", "fuzz", "hostile_contents", "user_commands", "e2e", "several_gpus"),
        ("topk_indices", "fp8_gemm_nt"),
    ),
    "another arch's row": (
        (
            "dsa/ops/elementwise/rms_norm.py",
            'kernels={"sm_90": ',
            'kernels={"sm_100": "dsa.kernels.elementwise.rms_norm_sm100", "sm_90": ',
        ),
        (),
        receipt.tested(),
    ),
    "a reference": (
        ("dsa/reference/elementwise/rms_norm.py", "import torch\n", "import torch\nNEW = 1\n"),
        ("rms_norm",),
        ("topk_indices",),
    ),
    "a tuned configuration": (
        ("dsa/tuned/sm_90/fp8_mqa_logits.json", '"winners": {', '"winners": {"new": 1, '),
        ("fp8_mqa_logits", "generation"),
        ("rms_norm",),
    ),
    "a gutted test": (
        ("tests/gpu/elementwise/test_rms_norm.py", "    assert ", "    assert True or "),
        ("rms_norm", "several_gpus"),
        ("topk_indices", "generation"),
    ),
    "a tolerance": (
        ("tests/gpu/mla/test_flash_mla_sparse_fwd.py", '"abs_tol": 8e-4', '"abs_tol": 8e-1'),
        ("flash_mla_sparse_fwd",),
        ("flash_mla_with_kvcache",),
    ),
    "what compares": (("dsa/testing.py", "error > abs_tol", "error > 2 * abs_tol"), receipt.tested(), ()),
    "the tests' frame": (
        ("tests/gpu/conftest.py", "manual_seed(0)", "manual_seed(1)"),
        ("rms_norm", "generation", "user_commands", "hostile_contents"),
        ("e2e",),
    ),
    "a benchmark": (
        ("dsa_bench/elementwise/rms_norm.py", "SHAPES = ", "SHAPES = SMALLER = "),
        ("rms_norm",),
        ("topk_indices", "generation", "e2e"),
    ),
    "hostile contents": (
        ("tests/hostile/__init__.py", "2**30", "2**29"),
        ("hostile_contents",),
        ("rms_norm", "generation"),
    ),
    "a layer": (
        ("dsa_layers/layers/norm.py", "import torch\n", "import torch\nNEW = 1\n"),
        ("generation", "user_commands", "e2e"),
        ("rms_norm", "fuzz"),
    ),
    "the command": (
        ("dsa_layers/command/main.py", "import sys\n", "import sys\nNEW = 1\n"),
        ("user_commands",),
        ("generation", "e2e"),
    ),
    "the self tests": (
        ("dsa/self_test/comparisons.py", "4e-3", "4e-2"),
        ("user_commands",),
        ("generation", "rms_norm"),
    ),
    "an example": (
        ("README.md", "```python\n", "```python\nNEW = 1\n"),
        ("user_commands",),
        ("generation", "rms_norm"),
    ),
    "a command": (
        ("README.md", "dsa generate --prompt", "dsa generate --top-p 0.9 --prompt"),
        ("user_commands",),
        ("generation", "rms_norm"),
    ),
    "every test's frame": (
        ("tests/conftest.py", "set_num_threads(1)", "set_num_threads(2)"),
        ("rms_norm", "fuzz"),
        ("e2e",),
    ),
    "a peer's call": (
        ("dsa_bench/peers/flash_mla.py", '"use_legacy": True', '"use_legacy": False'),
        ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "e2e"),
        ("rms_norm", "generation"),
    ),
    "how benchmarks time": (
        ("dsa_bench/harness/case.py", "repeats: int = 20", "repeats: int = 1"),
        ("flash_mla_sparse_fwd", "rms_norm"),
        ("generation",),
    ),
    "the tiny models": (
        ("dsa_layers/tiny/__init__.py", "from dsa_layers", "NEW = 1\nfrom dsa_layers"),
        ("generation", "user_commands"),
        ("e2e", "rms_norm"),
    ),
    "the sizes of the models": (
        ("dsa_layers/vendored/deepseek_v32_config.json", '"num_attention_heads": 128', '"num_attention_heads": 64'),
        ("e2e",),
        ("rms_norm",),
    ),
    "a document": (("README.md", "## Status", "## State of things"), (), receipt.tested()),
}


@pytest.mark.parametrize(("change", "ends", "keeps"), CHANGES.values(), ids=CHANGES)
def test_what_ends_an_entry(copy, change, ends, keeps):
    before = {name: receipt.digest(name, ARCH) for name in (*ends, *keeps)}
    copy(*change)
    after = {name: receipt.digest(name, ARCH) for name in before}
    assert {name for name in before if before[name] != after[name]} == set(ends)


def test_tables_of_whole_passes_are_generated():
    """Once the entry is verified; before, the document says itself where its tables are from."""
    entry, text = entries()["e2e"], (receipt.ROOT / "docs" / "e2e.md").read_text()
    if not entry["unverified"]:
        assert document.inserted(text, entry) == text, (
            "run `python -m dsa_bench.e2e.document tests/gpu/receipt.json docs/e2e.md`"
        )
    assert document.BEGIN in text


def test_a_changed_digest_is_noticed(monkeypatch):
    valid = {"unverified": None, "digest": "1" * 16, "tests": 1, "failed": 0, "bench": [{}]}
    valid |= {"commit": "0" * 12, "date": "2026-01-01", "device": "1 x NVIDIA H200"}
    monkeypatch.setattr(receipt, "load", lambda: {ARCH: {"rms_norm": valid}})
    monkeypatch.setattr(receipt, "digest", lambda name, arch: "1" * 16)
    test_receipt_is_of_this_code("rms_norm", ARCH)
    for change in ({"digest": "0" * 16}, {"failed": 1}, {"tests": 0}, {"bench": []}, {"commit": "1234-changed"}):
        monkeypatch.setattr(receipt, "load", lambda change=change: {ARCH: {"rms_norm": valid | change}})
        with pytest.raises(AssertionError):
            test_receipt_is_of_this_code("rms_norm", ARCH)
