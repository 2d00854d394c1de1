"""The public names of dsa: which bridge gives them, and which of them are ops. What goes through all ops, such as
documents, tables and tests, asks here."""

import ast
import inspect
from pathlib import Path

import dsa
from dsa.ops import op_modules

ROOT = Path(__file__).parent.parent
# What dsa has from no bridge, and dsa.reference beside the references of the ops: what several of these are made of.
BACKENDS = ("backend", "num_sms", "use_backend")
SHARED = {
    "dsa.reference.gemm.fp8_cast": ["ceil_to_ue8m0", "dequantize_per_token", "per_row_cast_to_fp8"],
    "dsa.reference.gemm.hadamard": ["hadamard_transform"],
}


def public_names() -> dict[str, list[str]]:
    """{a bridge's module: what it gives to dsa}."""
    found = {module: _given(module) for module in sorted(op_modules().values())}
    return {module: names for module, names in found.items() if names}


def _given(module: str) -> list[str]:
    """A bridge's `__all__`, read from its source: a new bridge is not imported yet."""
    for node in _body(ROOT.joinpath(*module.split(".")).with_suffix(".py")):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value))
    return []


def references() -> dict[str, list[str]]:
    """{a reference's module: what it gives to dsa.reference}: the public names of dsa that it defines, and SHARED."""
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
    """The ops that a bridge gives to dsa: its functions, and not its classes."""
    return [name for name in _given(module) if inspect.isfunction(getattr(dsa, name, None))]


def all_ops() -> set[str]:
    return {name for module in public_names() for name in ops_of(module)}
