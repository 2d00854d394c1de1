"""docs/how-to/add-a-family.md shows a family. In a copy of the package with its file and its line of the registry, its
checkpoints are written, read and continued, and the tests that hold for every family hold for it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "how-to" / "add-a-family.md").read_text()
((FILE, SOURCE),) = re.findall(r"^```python file=(\S+)\n(.*?)^```", TEXT, re.S | re.M)
(LINE,) = re.findall(r"^```python registry\n(.*?)^```", TEXT, re.S | re.M)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """dsa_layers with the page's edits, and its tests; everything else comes from this checkout."""
    copy = tmp_path_factory.mktemp("project")
    for folder in ("dsa_layers", "tests"):
        leave = shutil.ignore_patterns("__pycache__", "model.safetensors", "gpu", "kernels")
        shutil.copytree(ROOT / folder, copy / folder, ignore=leave)
    shutil.copy(ROOT / "pyproject.toml", copy)
    (copy / FILE).write_text(SOURCE)
    registry = copy / "dsa_layers" / "models" / "registry.py"
    first = "FAMILIES = {\n"
    assert registry.read_text().count(first) == 1
    registry.write_text(registry.read_text().replace(first, first + LINE))
    return copy


def run(project, *command):
    path = os.pathsep.join([str(project), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [sys.executable, *command], cwd=project, capture_output=True, text=True, env=environment, timeout=300
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_commands_of_the_page(project):
    commands = re.findall(r"^dsa (.*)", TEXT, re.M)
    assert [command.split()[0] for command in commands] == ["tiny", "generate"]
    run(project, "-m", "dsa_layers.command.main", "tiny", ".tiny-dot", "--model", "dot_dsa")
    options = ["--prompt", "The lightning indexer scores", "--max-tokens", "4", "--device", "cpu"]
    assert run(project, "-m", "dsa_layers.command.main", "generate", ".tiny-dot", *options).strip()


@pytest.mark.slow
def test_what_holds_for_every_family(project):
    """Each of these tests has a case of it, and they pass: FP8, dequantised and BF16, in chunks over a paged cache."""
    files = ["tests/layers/models/test_registry.py", "tests/layers/test_tiny_checkpoint.py"]
    printed = run(
        project,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-vv",
        "-k",
        "dot_dsa and (generates or holds_exactly) or file_named",
        *files,
    )
    passed = set(re.findall(r"::(test_\w+)\[.*dot_dsa.*PASSED", printed))
    assert passed >= {"test_generates", "test_holds_exactly_the_published_tensors"}, printed
    assert "test_every_family_is_in_a_file_named_by_its_model_type PASSED" in printed


@pytest.mark.slow
def test_it_decodes_as_it_prefills(project):
    """Greedy tokens of a prompt longer than top_k, over pages and one by one, are those of whole passes."""
    script = """
import torch
from dsa_layers import Generator, SamplingParams, SequenceBatch, load_model
from dsa_layers.tiny import write_tiny_checkpoint

write_tiny_checkpoint("tiny", model="dot_dsa")
model = load_model("tiny", device="cpu", dtype=torch.float32, dequantize=True, progress=False)
prompt = [2 + i * i % 2000 for i in range(150)]
(done,) = Generator(model, cache_tokens=512, prefill_chunk=64).generate([prompt], SamplingParams(max_tokens=4))
tokens = list(prompt)
with torch.no_grad():
    for token in done.tokens:
        logits = model(torch.tensor(tokens), SequenceBatch.without_cache([len(tokens)]))
        assert logits.argmax().item() == token
        tokens.append(token)
"""
    run(project, "-c", script)
