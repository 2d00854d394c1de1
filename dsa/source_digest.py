"""A digest of what a module's code does: its syntax tree and those of the modules of this project that it imports.

Comments, layout and docstrings do not count, so a corrected sentence keeps compiled kernels and GPU receipts valid,
and any change that could alter a result does not. Nothing is imported to compute it.
"""

import ast
import functools
import hashlib
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dsa",)


def _path_of(module: str) -> Path | None:
    """The file of a module of this project, or None for one from elsewhere (or an attribute of a module)."""
    if module.partition(".")[0] not in PACKAGES:
        return None
    stem = _ROOT.joinpath(*module.split("."))
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path
    return None


@functools.cache
def _tree(path: Path) -> ast.Module:
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:] or [ast.Pass()]
    return tree


def _dump(node: object) -> str:
    """ast.dump without empty fields, which a later Python may have added: every version gives the same digest."""
    if isinstance(node, ast.AST):
        fields = [f"{name}={_dump(value)}" for name, value in ast.iter_fields(node) if value not in (None, [])]
        return f"{type(node).__name__}({', '.join(fields)})"
    return f"[{', '.join(map(_dump, node))}]" if isinstance(node, list) else repr(node)


def _imports(module: str, path: Path) -> set[str]:
    """Every module of this project that `module` imports, at its top or inside a function."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            # `from package import name`: name is a submodule or something that the package defines.
            found |= {f"{base}.{alias.name}" if _path_of(f"{base}.{alias.name}") else base for alias in node.names}
    return {name for name in found if _path_of(name)}


@functools.cache
def modules_used_by(module: str) -> tuple[str, ...]:
    """The modules of this project that `module` needs, itself included, sorted."""
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        path = _path_of(name)
        if path is None:
            raise ValueError(f"module: {name!r} is not a module of {' or '.join(PACKAGES)}")
        if name not in seen:
            seen.add(name)
            todo.extend(_imports(name, path) - seen)
    return tuple(sorted(seen))


@functools.cache
def source_digest(module: str) -> str:
    """SHA-256, 16 hex digits, over the syntax trees of `modules_used_by(module)`."""
    h = hashlib.sha256()
    for name in modules_used_by(module):
        h.update(f"{name}\n{_dump(_tree(_path_of(name)))}\n".encode())
    return h.hexdigest()[:16]


def has_kernel(op: str) -> bool:
    """Whether `dsa.ops.<op>` reaches a CuTe DSL kernel."""
    return any(name.startswith("dsa.kernels.") for name in modules_used_by(f"dsa.ops.{op}"))
