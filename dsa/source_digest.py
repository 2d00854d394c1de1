"""A digest of what a module's code does: its syntax tree and those of the modules of this project that it imports.

Comments, layout and docstrings do not count, so a corrected sentence keeps compiled kernels and GPU receipts valid,
and any change that could alter a result does not. Nothing is imported to compute it. The same trees tell which
functions have kernels.

A bridge names its kernels' modules by GPU arch, in the declaration of an op or in `Kernels(...)`: as a dict of archs,
{"sm_90": "dsa.kernels.FAMILY.MODULE"}. These are its rows of the table of kernels, and each row counts as an import.
Where an arch is given, only its rows count: the kernels of another arch, and that there are any, change no digest.
"""

import ast
import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from dsa.source_stamps import first_stamps, stamp

_ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("dsa",)
_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)  # all below which a statement can stand


def _path_of(module: str, packages: tuple[str, ...] = PACKAGES) -> Path | None:
    """The file of a module of these packages, or None for one from elsewhere (or an attribute of a module)."""
    if module.partition(".")[0] not in packages:
        return None
    stem = _ROOT.joinpath(*module.split("."))
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path
    return None


@functools.cache
def _tree(path: Path, arch: str = "") -> ast.Module:
    """With `arch`, without the rows of the table of kernels that are another's."""
    source = path.read_bytes()
    return _of_arch(source, arch) if arch and _may_have_rows(source) else _parsed(source)


def _may_have_rows(source: bytes) -> bool:
    return b"dsa.kernels." in source


@functools.cache
def _parsed(source: bytes) -> ast.Module:
    return _without_docstrings(ast.parse(source))


@functools.cache
def _of_arch(source: bytes, arch: str) -> ast.Module:
    tree = _without_docstrings(ast.parse(source))
    for node in _walk(tree):
        if rows_in(node):
            rows = [row for row in zip(node.keys, node.values) if row[0].value == arch]
            node.keys, node.values = [key for key, _ in rows], [value for _, value in rows]
    return tree


def _walk(tree: ast.AST, kinds: tuple[type, ...] = (ast.AST,)) -> list[ast.AST]:
    """What `ast.walk` gives, in a third of its time; of some kinds alone, those that stand below no other kind."""
    found = [tree]
    for node in found:
        for part in vars(node).values():
            if isinstance(part, kinds):
                found.append(part)
            elif type(part) is list:
                found += [one for one in part if isinstance(one, kinds)]
    return found


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in _walk(tree, _STATEMENTS):
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
        texts = []
        for name in node._fields:
            value = getattr(node, name, None)
            if value is not None and value != []:
                texts.append(f"{name}={_dump(value)}")
        return f"{type(node).__name__}({', '.join(texts)})"
    return f"[{', '.join(map(_dump, node))}]" if isinstance(node, list) else repr(node)


@functools.cache
def _import_statements(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in _walk(tree, _STATEMENTS) if isinstance(node, ast.Import | ast.ImportFrom)]


def _imports(module: str, path: Path, packages: tuple[str, ...], arch: str) -> set[str]:
    """Every module of these packages that `module` imports, at its top or inside a function."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in _import_statements(_tree(path, arch)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            base = _base(node, package)
            # `from package import name`: name is a submodule or something that the package defines.
            names = (f"{base}.{alias.name}" for alias in node.names)
            found |= {name if _path_of(name, packages) else base for name in names}
    if _may_have_rows(path.read_bytes()):
        found |= _kernels_in(_tree(path, arch))
    return {name for name in found if _path_of(name, packages)}


@functools.cache
def _kernels_in(tree: ast.AST) -> frozenset[str]:
    """The kernels' modules in all rows of a module."""
    return frozenset(name for node in _walk(tree) for names in rows_in(node).values() for name in names)


def rows_in(node: ast.AST) -> dict[str, tuple[str, ...]]:
    """{arch: the kernels' modules} of a node that is a dict of rows of the table of kernels, {} of any other."""
    if not isinstance(node, ast.Dict) or not all(map(_is_arch, node.keys)):
        return {}
    rows = {key.value: _strings(value) for key, value in zip(node.keys, node.values)}
    return rows if any(name.startswith("dsa.kernels.") for names in rows.values() for name in names) else {}


def _is_arch(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and re.fullmatch(r"sm_\d+", str(node.value)) is not None


def _strings(node: ast.AST) -> tuple[str, ...]:
    return tuple(part.value for part in _walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str))


def _base(node: ast.ImportFrom, package: str) -> str:
    """The absolute name of what a module of `package` imports from."""
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    parents = parents[: len(parents) - node.level + 1]
    return ".".join([*parents, node.module] if node.module else parents)


@functools.cache
def modules_used_by(module: str, packages: tuple[str, ...] = PACKAGES, arch: str = "") -> tuple[str, ...]:
    """The modules of these packages that `module` needs, itself included, sorted."""
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        path = _path_of(name, packages)
        if path is None:
            raise ValueError(f"module: {name!r} is not a module of {' or '.join(packages)}")
        if name not in seen:
            seen.add(name)
            todo.extend(_imports(name, path, packages, arch) - seen)
    return tuple(sorted(seen))


def digest_of(modules: Iterable[str], arch: str = "") -> str:
    """SHA-256, 16 hex digits, over the syntax trees of modules of this project, whichever their package."""
    h = hashlib.sha256()
    for name in modules:
        h.update(f"{name}\n{_module_text(name, arch)}\n".encode())
    return h.hexdigest()[:16]


@functools.cache
def _module_text(name: str, arch: str = "") -> str:
    return _text(_tree(_path_of(name, (name.partition(".")[0],)), arch))


@functools.cache
def _text(tree: ast.Module) -> str:
    return _dump(tree)


@functools.cache
def source_digest(module: str) -> str:
    """The digest of `modules_used_by(module)`."""
    return digest_of(modules_used_by(module))


def unchanged(module: str | None = None) -> bool:
    """Whether what `module` uses, or else this whole package, is as it was when this process imported it: else nothing
    that the process makes may be kept under a digest. A module that is new does not count: who uses it was edited."""
    first = first_stamps(_ROOT / "dsa")
    try:
        paths = first if module is None else [str(_path_of(name)) for name in modules_used_by(module)]
    except (OSError, ValueError):  # a module that is gone
        return False
    return all(path in first and stamp(path) == first[path] for path in paths)


@functools.cache
def digest_of_bytes() -> str:
    """SHA-256 over the paths and bytes of all modules of this package: as long as it is the same, all digests are."""
    h = hashlib.sha256()
    for path in sorted(filter(Path.is_file, (_ROOT / "dsa").rglob("*.py"))):  # an editor's links are none
        content = path.read_bytes()
        h.update(f"{path.relative_to(_ROOT)}\n{len(content)}\n".encode() + content)
    return h.hexdigest()


def op_modules() -> dict[str, str]:
    """{op: its bridge's module}: every file of dsa/ops/FAMILY whose name does not begin with an underscore."""
    paths = sorted((_ROOT / "dsa" / "ops").glob("*/[!_]*.py"))
    return {path.stem: f"dsa.ops.{path.parent.name}.{path.stem}" for path in paths}


def op_module(op: str) -> str:
    """The module of an op's bridge, or a ValueError that lists the ops."""
    if op not in op_modules():
        raise ValueError(f"op: must be one of {', '.join(op_modules())}, got {op!r}")
    return op_modules()[op]


def has_kernel(op: str, arch: str = "") -> bool:
    """Whether the op's bridge reaches a CuTe DSL kernel, for this arch or for any."""
    suffix = f"_{arch.replace('_', '')}" if arch else ""
    return any(is_kernel(name) and name.endswith(suffix) for name in modules_used_by(op_module(op), arch=arch))


def is_kernel(module: str) -> bool:
    """Whether it is a kernel's module, named for its arch, and not what kernels share or their limits."""
    return re.fullmatch(r"dsa\.kernels\.(\w+\.)*\w+_sm\d+", module) is not None


@functools.cache
def functions_with_kernels(module: str, arch: str = "") -> frozenset[str]:
    """The names that a bridge defines at its top whose code reaches a CuTe DSL kernel, there or through a name of
    another bridge; with `arch`, one of that arch."""
    package, tree = module.rpartition(".")[0], _tree(_path_of(module), arch)
    reaching = _kernel_names(tree.body, package, arch)
    definitions = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            definitions[node.targets[0].id] = node.value
    while True:
        found = {
            name
            for name, node in definitions.items()
            if name not in reaching
            and (
                _kernel_names(_walk(node), package, arch)
                or any(map(rows_in, _walk(node)))
                or any(isinstance(part, ast.Name) and part.id in reaching for part in _walk(node))
            )
        }
        if not found:
            return frozenset(reaching & definitions.keys())
        reaching |= found


def _kernel_names(nodes: Iterable[ast.AST], package: str, arch: str) -> set[str]:
    """What the import statements among these nodes bind that is a kernel's, or a bridge's function that has one."""
    found = set()
    for node in nodes:
        if not isinstance(node, ast.ImportFrom):
            continue
        base = _base(node, package)
        for alias in node.names:
            bound, whole = alias.asname or alias.name, f"{base}.{alias.name}"
            if is_kernel(base) or is_kernel(whole):
                found.add(bound)
            elif base.startswith("dsa.ops.") and alias.name in functions_with_kernels(base, arch):
                found.add(bound)
            elif base == "dsa.ops" and _path_of(whole) and functions_with_kernels(whole, arch):
                found.add(bound)
    return found
