"""Imports between packages have one direction, `import dsa` stays cheap, and code is in the folder where it belongs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The packages and modules of this project that each package may import, with their submodules.
ALLOWED = {
    "dsa/reference": {"dsa.reference"},
    "dsa/runtime": {"dsa.runtime"},
    "dsa/cute": {"dsa.cute"},
    "dsa/cases": {"dsa"},
    "dsa/kernels": {"dsa.cute", "dsa.kernels", "dsa.runtime"},
    "dsa/ops": {"dsa.ops", "dsa.kernels", "dsa.runtime", "dsa.reference"},
    "dsa/parallel": {"dsa.parallel", "dsa.kernels", "dsa.runtime"},
    "dsa/compat": {"dsa.compat", "dsa.ops", "dsa.runtime", "dsa.reference"},
    "dsa_layers/layers": {"dsa", "dsa_layers.layers", "dsa_layers.cache", "dsa_layers.batch"},
    "dsa_layers": {"dsa", "dsa_layers", "dsa_bench"},
    "dsa_bench": {"dsa", "dsa_layers", "dsa_bench"},
    "dsa_engines": {"dsa", "dsa_layers", "dsa_engines"},
}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from dsa.runtime import backends` imports the submodule dsa.runtime.backends.
            submodules = [alias.name for alias in node.names if (ROOT / node.module.replace(".", "/")).is_dir()]
            found = [
                f"{node.module}.{n}" for n in submodules if list(ROOT.glob(f"{node.module}/{n}*".replace(".", "/")))
            ]
            yield from found or [node.module]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1, f"{path}: relative imports stay in their package"


@pytest.mark.parametrize("package", ALLOWED)
def test_direction(package):
    ours = {"dsa", "dsa_layers", "dsa_bench", "dsa_engines", "tests"}
    for path in (ROOT / package).rglob("*.py"):
        for name in imports(path):
            if name.partition(".")[0] in ours:
                assert any(name == a or name.startswith(a + ".") for a in ALLOWED[package]), f"{path}: {name}"


def test_kernels_share_only_what_is_in_cute():
    """A family's kernels depend only on sources in the family's folder and in dsa/cute. The key of the compile cache
    (`dsa.runtime.compile_cache`) contains no other sources."""
    for path in (ROOT / "dsa" / "kernels").rglob("*.py"):
        for name in imports(path):
            family = name.removeprefix("dsa.kernels.").partition(".")[0]
            assert not name.startswith("dsa.kernels.") or family == path.parent.name, f"{path}: {name}"


def cute_modules():
    for path in sorted((ROOT / "dsa" / "cute").glob("*.py")):
        if path.stem not in {"__init__", "tuning"}:
            yield f"dsa.cute.{path.stem}", ast.parse(path.read_text())


def imported_names(tree, package):
    """Return {name: "module.name"} for the names that a syntax tree imports from `package` or modules in it. With `as`,
    the key is the new name."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith(package)]
    return {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in nodes for alias in node.names}


def definitions(tree):
    found = {}
    for node in tree.body:
        targets = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
        if isinstance(node, ast.Assign):
            targets = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        found |= dict.fromkeys(targets, node)
    return found


def families_by_symbol():
    """Return {symbol of dsa.cute: the families of kernels that use it, directly or through other symbols}."""
    users, families, defined = {}, {}, set()
    for module, tree in cute_modules():
        own = definitions(tree)
        known = imported_names(tree, "dsa.cute") | {name: f"{module}.{name}" for name in own}
        for name, node in own.items():
            families[known[name]] = set()
            defined.add(known[name])
            for used in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & known.keys() - {name}:
                users.setdefault(known[used], set()).add(known[name])
    for path in (ROOT / "dsa" / "kernels").glob("*/*.py"):
        for symbol in imported_names(ast.parse(path.read_text()), "dsa.cute").values():
            families.setdefault(symbol, set()).add(path.parent.name)
    for _ in families:  # enough passes for the longest chain of symbols
        for symbol, of in families.items():
            of.update(*(families[user] for user in users.get(symbol, ())))
    return {symbol: of for symbol, of in families.items() if symbol in defined}


# {symbol of dsa.cute that only one family uses: why it is in dsa.cute}
OF_ONE_FAMILY = {
    "copies.arrive_when_gathered_too": "an instruction beside arrive_when_gathered, from which it has to be told",
    "shared_memory.load_byte": "an instruction beside load_4",
    "shared_memory.load_registers": "load_16 with another result",
}


def test_device_code_of_one_family_is_not_in_cute():
    alone = {symbol.removeprefix("dsa.cute."): of for symbol, of in families_by_symbol().items() if len(of) < 2}
    assert {name: of for name, of in alone.items() if name not in OF_ONE_FAMILY} == {}
    assert OF_ONE_FAMILY.keys() <= alone.keys(), "exceptions that are none"


def calls_of_arch(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "arch":
            yield node.attr


def test_kernels_wait_and_arrive_by_pipelines():
    found = {}
    for path in sorted((ROOT / "dsa" / "kernels").glob("*/*.py")):
        names = {name for name in calls_of_arch(ast.parse(path.read_text())) if name.startswith("mbarrier")}
        if names := names - {"mbarrier_init_fence"}:
            found[str(path.relative_to(ROOT))] = names
    assert found == {}


MOST_LINES, FEWEST_LINES = 620, 30
# {file that may have fewer than FEWEST_LINES: why it is a separate file}
SHORT = {
    "dsa/cute/rounded.py": "an act of its own, of four families",
    "dsa/cute/slices.py": "the order of sums of two families",
    "dsa/cute/tile_counter.py": "read by all dynamic persistent schedulers",
    "dsa/cute/wgmma.py": "an act of its own",
}


def line_count(path):
    return len(path.read_text().splitlines())


def test_kernel_files_are_not_too_long():
    long = {path.name: line_count(path) for path in (ROOT / "dsa" / "kernels").rglob("*.py")}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


def test_files_are_not_too_short():
    # References may be short, because some formulas are.
    paths = [path for path in (ROOT / "dsa").rglob("*.py") if not path.name.endswith(("__init__.py", "limits.py"))]
    paths = [path for path in paths if ROOT / "dsa" / "reference" not in path.parents]
    short = {str(path.relative_to(ROOT)): line_count(path) for path in paths if line_count(path) < FEWEST_LINES}
    assert {name: lines for name, lines in short.items() if name not in SHORT} == {}
    assert SHORT.keys() <= short.keys(), "exceptions that are none"


def test_references_import_only_torch_and_the_standard_library():
    for path in (ROOT / "dsa" / "reference").rglob("*.py"):
        packages = {name.partition(".")[0] for name in imports(path)}
        assert packages <= {"torch", "dsa"} | sys.stdlib_module_names, path


def test_importing_dsa_imports_no_dsl_and_initialises_no_gpu():
    script = (
        "import sys, dsa, torch; "
        "assert not {'cutlass', 'tvm_ffi', 'dsa_engines'} & {m.partition('.')[0] for m in sys.modules}; "
        "assert 'dsa.parallel' not in sys.modules; "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("package", ["dsa", "dsa_layers", "dsa_bench", "dsa_engines"])
def test_no_module_is_imported_by_what_it_imports(package):
    """Imports for type checkers and inside functions count, too. They cause no error, but make code as hard to read."""
    graph = {module(path): set(modules_imported(path)) for path in (ROOT / package).rglob("*.py")}
    assert circle(graph) is None


def test_circles_are_found():
    graph = {"a": {"b", "torch"}, "b": {"c"}, "c": {"d", "b"}, "d": set()}
    assert circle(graph) == ["b", "c", "b"]
    assert circle(graph | {"c": {"d"}}) is None


def module(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules_imported(path):
    """Yield the modules of this project that `path` imports, and their parent packages. Leave out `path` and packages
    that contain it."""
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
    """Return the modules of a cycle of imports, the first one again at the end, or None. graph: {module: modules that
    it imports}."""
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


def parts(package):
    """A part is a module or subpackage directly in the package."""
    graph = {}
    for path in (ROOT / package).rglob("*.py"):
        part = ".".join(module(path).split(".")[:2])
        found = {".".join(n.split(".")[:2]) for n in modules_imported(path) if n.startswith(f"{package}.")}
        graph.setdefault(part, set()).update(found - {part})
    return graph


@pytest.mark.parametrize("package", ["dsa_layers", "dsa_bench", "dsa_engines"])
def test_parts_of_a_package_do_not_import_one_another_in_circles(package):
    assert circle(parts(package)) is None


def package_of(name):
    """Packages, and modules directly in a top-level package, have themselves as package."""
    is_package = (ROOT / name.replace(".", "/") / "__init__.py").exists()
    return name if is_package or name.count(".") == 1 else name.rpartition(".")[0]


def test_no_package_is_imported_by_what_it_imports():
    graph = {}
    for path in (p for top in ("dsa_layers", "dsa_bench", "dsa_engines") for p in (ROOT / top).rglob("*.py")):
        own = package_of(module(path))
        graph.setdefault(own, set()).update({package_of(name) for name in modules_imported(path)} - {own})
    assert circle(graph) is None


@pytest.mark.parametrize("folder", ["layers", "families", "batch", "cache"])
def test_layers_and_models_know_no_engine(folder):
    above = tuple(f"dsa_layers.{name}" for name in ("engine", "generation", "parallel", "training", "hf", "command"))
    for path in (ROOT / "dsa_layers" / folder).rglob("*.py"):
        assert not [name for name in modules_imported(path) if name.startswith(above)], path
