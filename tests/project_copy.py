"""A copy of the project, for tests that change its source as a page of docs/ describes."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("dsa", "dsa_layers", "dsa_bench", "dsa_engines", "docs", "tests", "examples")


def copy_project(target: Path) -> Path:
    leave = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.png")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, ignore=leave)
    for file in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / file, target)
    return target


# For a copy in which an example has added a kernel to the family `elementwise`: record new variants in
# tests/kernels/machine_code.json, with a placeholder instead of a digest.
RECORDED = """
import json

from tests.kernels import machine_code

there = machine_code.recorded()
own = there["families"]["elementwise"]
own["key"] = machine_code.key_of("elementwise")
own["variants"] = {name: own["variants"].get(name, "new code") for name in machine_code.shipped("elementwise")}
machine_code.PATH.write_text(json.dumps(there))
"""
