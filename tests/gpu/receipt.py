"""The GPU receipt: which code was tested on a GPU, with what outcome, and how fast it was.

`tests/gpu/test_NAME.py` and `benchmarks/NAME.py` belong to the op NAME, whose code is `dsa/ops/NAME.py` (a suffix
`_sparse` names a part of an op). The digest covers that module and everything of this project that it imports.
"""

import json
from pathlib import Path
from typing import Any

from dsa.source_digest import has_kernel, source_digest

HERE = Path(__file__).parent
PATH = HERE / "receipt.json"
PARTS = ("_sparse",)


def load() -> dict[str, Any]:
    return json.loads(PATH.read_text()) if PATH.exists() else {"ops": {}}


def op_module(name: str) -> str:
    for part in PARTS:
        name = name.removesuffix(part)
    return f"dsa.ops.{name}"


def digest(name: str) -> str:
    return source_digest(op_module(name))


def tested_ops() -> list[str]:
    """The ops that have GPU tests."""
    return sorted(path.stem.removeprefix("test_") for path in HERE.glob("test_*.py"))


def ops_with_kernels() -> list[str]:
    """The op modules that reach a kernel: each needs a receipt."""
    ops = (path.stem for path in (HERE.parent.parent / "dsa" / "ops").glob("[!_]*.py"))
    return sorted(filter(has_kernel, ops))
