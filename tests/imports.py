"""What a Python file imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def imports(path: Path) -> Iterator[str]:
    """The absolute names of what a file of the project imports, anywhere in it."""
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
