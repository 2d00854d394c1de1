"""Find benchmarks by their paths. Imports no benchmark, so that `dsa bench --help` is quick."""

import importlib.util
import re
from pathlib import Path

_HERE = Path(__file__).parent.parent


def benchmarks() -> dict[str, str]:
    """Return {op: name of the op's benchmark module} for the files dsa_bench/FAMILY/OP.py, where FAMILY is a family of
    dsa.ops."""
    (dsa,) = importlib.util.find_spec("dsa").submodule_search_locations
    families = {path.parent.name for path in Path(dsa, "ops").glob("*/__init__.py")}
    paths = (path for path in _HERE.glob("*/[!_]*.py") if path.parent.name in families)
    return {path.stem: f"dsa_bench.{path.parent.name}.{path.stem}" for path in sorted(paths, key=lambda p: p.stem)}


def tunable() -> list[str]:
    """Return the ops with tile configurations to search: those whose benchmark module defines `tuning`."""
    files = {op: _HERE.parent.joinpath(*module.split(".")).with_suffix(".py") for op, module in benchmarks().items()}
    return [op for op, path in files.items() if re.search(r"^def tuning\(", path.read_text(encoding="utf-8"), re.M)]
