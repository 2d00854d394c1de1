"""Imports go one way, and `import dsa` stays cheap."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What each package may import of this project.
ALLOWED = {
    "dsa/reference": {"dsa.reference"},
    "dsa/cute": {"dsa.cute", "dsa.source_digest"},
    "dsa/kernels": {"dsa.cute", "dsa.kernels"},
    "dsa/ops": {"dsa.ops", "dsa.kernels", "dsa.backends", "dsa.reference"},
    "dsa_layers/layers": {"dsa", "dsa_layers.layers", "dsa_layers.cache", "dsa_layers.batch"},
    "dsa_layers": {"dsa", "dsa_layers", "dsa_bench"},
    "dsa_bench": {"dsa", "dsa_layers", "dsa_bench"},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from dsa import backends` imports a submodule, `from dsa import checks` too.
            submodules = [alias.name for alias in node.names if (ROOT / node.module.replace(".", "/")).is_dir()]
            found = [
                f"{node.module}.{n}" for n in submodules if list(ROOT.glob(f"{node.module}/{n}*".replace(".", "/")))
            ]
            yield from found or [node.module]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, f"{path}: relative imports stay in their package"


@pytest.mark.parametrize("package", ALLOWED)
def test_direction(package):
    ours = {"dsa", "dsa_layers", "dsa_bench", "tests"}
    for path in (ROOT / package).rglob("*.py"):
        for name in imports(path):
            if name.partition(".")[0] in ours:
                assert any(name == a or name.startswith(a + ".") for a in ALLOWED[package]), f"{path}: {name}"


def test_kernels_share_only_what_is_in_cute():
    """A family's device code is its own; what two families need is in dsa.cute."""
    for path in (ROOT / "dsa" / "kernels").glob("*/*.py"):
        for name in imports(path):
            family = name.removeprefix("dsa.kernels.").partition(".")[0]
            assert not name.startswith("dsa.kernels.") or family == path.parent.name, f"{path}: {name}"


def test_references_import_only_torch_and_the_standard_library():
    for path in (ROOT / "dsa" / "reference").rglob("*.py"):
        packages = {name.partition(".")[0] for name in imports(path)}
        assert packages <= {"torch", "dsa"} | sys.stdlib_module_names, path  # of dsa its references: test_direction


def test_importing_dsa_imports_no_dsl_and_initialises_no_gpu():
    script = (
        "import sys, dsa, torch; "
        "assert not {'cutlass', 'tvm_ffi'} & {m.partition('.')[0] for m in sys.modules}; "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("package", ["dsa", "dsa_layers", "dsa_bench"])
def test_no_module_is_imported_by_what_it_imports(package):
    """Imports for type checkers and inside functions count: a circle of these is one as well to who reads it."""
    graph = {module(path): set(modules_imported(path)) for path in (ROOT / package).rglob("*.py")}
    assert circle(graph) is None


def test_circles_are_found():
    graph = {"a": {"b", "torch"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}
    assert circle(graph) == ["b", "c", "b"]
    assert circle(graph | {"c": {"d"}}) is None


def module(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules_imported(path):
    """The modules of this project, with the packages that they are in, but for those that `path` is in itself."""
    own = module(path)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = own if path.name == "__init__.py" else own.rpartition(".")[0]
            base = (f"{package}." if node.level else "") + (node.module or "")
            names = [f"{base}.{alias.name}".replace("..", ".") for alias in node.names]
        else:
            continue
        for name in names:
            while name:
                place = ROOT / name.replace(".", "/")
                inside = own == name or own.startswith(name + ".")
                if not inside and (place.with_suffix(".py").exists() or (place / "__init__.py").exists()):
                    yield name
                name = name.rpartition(".")[0]


def circle(graph):
    """Modules each of which imports the next, the first of them again at the end; None if there are none."""
    finished = set()

    def search(path):
        name = path[-1]
        if name in path[:-1]:
            return path[path.index(name) :]
        if name in finished or name not in graph:
            return None
        found = next(filter(None, (search([*path, other]) for other in sorted(graph[name]))), None)
        finished.add(name)
        return found

    return next(filter(None, (search([name]) for name in sorted(graph))), None)
