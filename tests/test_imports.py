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
        assert {name.partition(".")[0] for name in imports(path)} <= {
            "torch",
            "dsa",  # dsa.reference alone: test_direction
            "dataclasses",
            "collections",
            "functools",
            "itertools",
        }, path


def test_importing_dsa_imports_no_dsl_and_initialises_no_gpu():
    script = (
        "import sys, dsa, torch; "
        "assert not {'cutlass', 'tvm_ffi'} & {m.partition('.')[0] for m in sys.modules}; "
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
