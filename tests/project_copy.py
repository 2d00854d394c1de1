"""A copy of the project, for tests that change its source as a page of docs/ says."""

import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("dsa", "dsa_layers", "dsa_bench", "dsa_engines", "docs", "tests", "examples")


def copy_project(target: Path) -> Path:
    """Without weights and pictures, which no such test reads. -> target."""
    leave = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.png")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, target / folder, ignore=leave)
    for file in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / file, target)
    return target
