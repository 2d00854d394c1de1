"""The GPU receipt: which code was tested on a GPU, with what outcome, and how fast it was.

`tests/gpu/test_NAME.py` and `dsa_bench/NAME.py` belong to the op NAME, whose code is `dsa/ops/NAME.py` (a suffix
of PARTS names a part of an op). The digest covers that module, everything of this project that it imports, and the
tile configurations that its kernels load. `tests/gpu/test_generation.py` belongs to the models: its digest covers all
ops and the layers.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from dsa.source_digest import _dump, _tree, has_kernel, modules_used_by, source_digest

HERE = Path(__file__).parent
PATH = HERE / "receipt.json"
TUNED = HERE.parent.parent / "dsa" / "tuned"
PARTS = ("_sparse", "_forward", "_gradient", "_per_head")
GENERATION = "generation"
LAYERS = HERE.parent.parent / "dsa_layers"
# What no pass of a model runs.
NOT_RUN = ("cli.py", "export.py", "health.py", "indexer_stage.py", "tiny")


def load() -> dict[str, Any]:
    return json.loads(PATH.read_text()) if PATH.exists() else {"ops": {}}


def op_module(name: str) -> str:
    for part in PARTS:
        name = name.removesuffix(part)
    return f"dsa.ops.{name}"


def digest(name: str) -> str:
    if name == GENERATION:
        return _digest_of_generation()
    h = hashlib.sha256(source_digest(op_module(name)).encode())
    for module in modules_used_by(op_module(name)):
        data = TUNED / f"{module.rpartition('.')[2].removesuffix('_sm90')}.json"
        if module.startswith("dsa.kernels.") and data.exists():
            h.update(json.dumps(json.loads(data.read_text())["winners"], sort_keys=True).encode())
    return h.hexdigest()[:16]


def _digest_of_generation() -> str:
    ops = sorted({op_module(name) for name in tested_ops() if name != GENERATION})
    h = hashlib.sha256("".join(map(source_digest, ops)).encode())
    for path in sorted(LAYERS.rglob("*.py")):
        place = path.relative_to(LAYERS)
        if place.parts[0] not in NOT_RUN:
            h.update(f"{place.as_posix()}\n{_dump(_tree(path))}\n".encode())
    return h.hexdigest()[:16]


def tested_ops() -> list[str]:
    """The ops that have GPU tests, and generation."""
    return sorted(path.stem.removeprefix("test_") for path in HERE.glob("test_*.py"))


def ops_with_kernels() -> list[str]:
    """The op modules that reach a kernel: each needs a receipt."""
    ops = (path.stem for path in (HERE.parent.parent / "dsa" / "ops").glob("[!_]*.py"))
    return sorted(filter(has_kernel, ops))
