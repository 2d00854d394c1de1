"""The example family of docs/how-to/add-a-family.md works in a copy of the package with the page's edits."""

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
    """Return a folder with copies of tests and of dsa_layers, which has the page's edits."""
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
    options = {"cwd": project, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run([sys.executable, *command], **options)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.mark.slow
def test_the_commands_of_the_page_run_and_single_tokens_give_the_text_of_a_whole_pass(project):
    commands = re.findall(r"^dsa (.*)", TEXT, re.M)
    assert [command.split()[0] for command in commands] == ["tiny", "generate"]
    run(project, "-m", "dsa_layers.command.main", "tiny", ".tiny-dot", "--model", "dot_dsa")
    prompt = " ".join(map(str, range(100)))  # more tokens than the indexer selects
    options = ["--prompt", prompt, "--max-tokens", "4", "--temperature", "0", "--device", "cpu", "--dtype", "float32"]
    texts = {
        run(project, "-m", "dsa_layers.command.main", "generate", ".tiny-dot", *options, "--prefill-chunk", size)
        for size in ("2048", "1")
    }
    assert len(texts) == 1 and texts.pop().strip() != prompt


@pytest.mark.slow
def test_the_tests_of_every_family_hold_for_it(project):
    files = ["tests/layers/models/test_registry.py", "tests/layers/test_tiny_checkpoint.py"]
    chosen = "dot_dsa and (generates or holds_exactly) or file_named"
    printed = run(project, "-m", "pytest", "-p", "no:cacheprovider", "-vv", "-k", chosen, *files)
    passed = set(re.findall(r"::(test_\w+)\[.*dot_dsa.*PASSED", printed))
    assert passed >= {"test_generates", "test_holds_exactly_the_published_tensors"}, printed
    assert "test_every_family_is_in_a_file_named_by_its_model_type PASSED" in printed
