"""The public names of dsa and dsa.reference, and the modules that define them. Generated files and tests of all ops use
them."""

import ast
import inspect
from pathlib import Path

import dsa
from dsa.ops import op_modules

ROOT = Path(__file__).parent.parent
# BACKENDS: public names of dsa that dsa.ops does not define. SHARED: public helpers of dsa.reference.
BACKENDS = ("backend", "num_sms", "use_backend")
SHARED = {
    "dsa.reference.gemm.fp4_cast": ["dequantize_fp4", "quantize_fp4"],
    "dsa.reference.gemm.fp8_cast": ["ceil_to_ue8m0", "dequantize_per_token", "per_row_cast_to_fp8"],
    "dsa.reference.gemm.hadamard": ["hadamard_transform"],
}


def public_names() -> dict[str, list[str]]:
    """Return {module in dsa.ops: the public names of dsa that it defines}."""
    found = {module: _given(module) for module in sorted(op_modules().values())}
    return {module: names for module, names in found.items() if names}


def _given(module: str) -> list[str]:
    """Return a module's `__all__`, read from the source. dsa/__init__.py is generated from it, and may not import a new
    module yet."""
    for node in _body(ROOT.joinpath(*module.split(".")).with_suffix(".py")):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value))
    return []


def references() -> dict[str, list[str]]:
    public = {name for names in public_names().values() for name in names}
    found = {}
    for path in (ROOT / "dsa" / "reference").glob("*/[!_]*.py"):
        module = f"dsa.reference.{path.parent.name}.{path.stem}"
        defined = {node.name for node in _body(path) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        if names := sorted(public & defined | set(SHARED.get(module, ()))):
            found[module] = names
    return dict(sorted(found.items()))


def _body(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text()).body


def ops_of(module: str) -> list[str]:
    return [name for name in _given(module) if inspect.isfunction(getattr(dsa, name, None))]


def all_ops() -> set[str]:
    return {name for module in public_names() for name in ops_of(module)}
