"""Write what is made from the code: public names in dsa/__init__.py, docs/ops.md, docs/status.md, the README's table.

usage: python -m tests.generate

A bridge says in `__all__` which names it gives to dsa; its ops' declarations say which kernels there are. So a new op
is in no list that somebody keeps by hand. tests/test_generated.py fails where a file is not what this writes.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import dsa.ops
from dsa.backends import ARCH_NAMES, KERNELS
from dsa.source_digest import op_modules
from tests.gpu import headlines, status_table

ROOT = Path(__file__).parent.parent
INIT, OPS = ROOT / "dsa" / "__init__.py", ROOT / "docs" / "ops.md"
BACKENDS = ("backend", "num_sms", "use_backend")


def public_names() -> dict[str, list[str]]:
    """{a bridge's module: what it gives to dsa}, read from the source: a new bridge is not imported yet."""
    found = {}
    for module in op_modules().values():
        tree = ast.parse(Path(ROOT, *module.split(".")).with_suffix(".py").read_text())
        for node in tree.body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                found[module] = sorted(ast.literal_eval(node.value))
    return dict(sorted(found.items()))


def init() -> str:
    """dsa/__init__.py: its head stays, imports and `__all__` are made."""
    text = INIT.read_text()
    head, version = text[: text.index("from dsa.")], next(s for s in text.splitlines() if s.startswith("__version__"))
    imports = {"dsa.backends": list(BACKENDS)} | public_names()
    lines = [_import(module, names) for module, names in imports.items()]
    everything = sorted(name for names in imports.values() for name in names)
    listed = "".join(f'    "{name}",\n' for name in everything)
    return f"{head}{''.join(lines)}\n{version}\n\n__all__ = [\n{listed}]\n"


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}\n"
    if len(line) <= 121:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")\n"


def ops() -> str:
    """docs/ops.md: every public function with its signature and its docstring, family by family."""
    rows, parts = [], []
    for family, names in _families():
        parts.append(f"## {family}\n\n{inspect.getdoc(importlib.import_module(f'dsa.ops.{family}'))}\n")
        for name in names:
            function = getattr(dsa, name)
            doc = inspect.getdoc(function) or ""
            kernels = ", ".join(f"{arch} ({ARCH_NAMES.get(arch, '')})" for arch in KERNELS.get(name, {})) or "PyTorch"
            rows.append(f"| [`{name}`](#{name}) | {family} | {_first_sentence(doc)} | {kernels} |")
            signature = str(inspect.signature(function)).replace("torch.Tensor", "Tensor")
            parts.append(f"### {name}\n\n```text\ndsa.{name}{signature}\n\n{doc}\n```\n")
    table = "\n".join(["| op | family | what it computes | kernels |", "|---|---|---|---|", *rows])
    return f"{_HEAD}\n{table}\n\n{chr(10).join(parts)}"


_HEAD = """\
# Ops

Every public function of `dsa`, from its docstring; `python -m tests.generate` writes this page. An op without a kernel
for the GPU at hand runs its PyTorch reference; so does every op on a CPU.
"""


def _families() -> Iterator[tuple[str, list[str]]]:
    """(family, its functions)."""
    by_family: dict[str, list[str]] = {}
    for module, names in public_names().items():
        functions = [name for name in names if inspect.isfunction(getattr(dsa, name, None))]
        by_family.setdefault(module.split(".")[2], []).extend(functions)
    for family, names in by_family.items():
        yield family, sorted(names)


def _first_sentence(doc: str) -> str:
    first = doc.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return re.split(r"\.\s+(?=[A-Z])", first)[0].rstrip(".:")


def main() -> None:
    INIT.write_text(init())
    importlib.reload(dsa)  # with the new names
    OPS.write_text(ops())
    for document in (status_table, headlines):
        document.PATH.write_text(document.inserted(document.PATH.read_text()))


if __name__ == "__main__":
    main()
