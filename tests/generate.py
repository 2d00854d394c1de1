"""Write the files that are generated from the code and the GPU receipt.

usage: python -m tests.generate

- dsa/__init__.py and dsa/reference/__init__.py: imports of public names, from the `__all__` of the modules of dsa.ops
- docs/reference/ops/ and docs/reference/layers.md: signatures and docstrings
- the tables of all documents (tests/gpu/tables.py), and the date of docs/reference/status.md

No list of ops is kept by hand. tests/test_generated.py fails if a file differs from what this module writes.
"""

import importlib
import inspect
import re
from pathlib import Path

import dsa.ops
import dsa_layers
from dsa.runtime.backends import ARCH_NAMES, ARCHS
from tests.api_pages import section, section_with_members
from tests.gpu import status_table, tables
from tests.public_names import BACKENDS, ROOT, ops_of, public_names, references

INIT, OPS = ROOT / "dsa" / "__init__.py", ROOT / "docs" / "reference" / "ops"
LAYERS = ROOT / "docs" / "reference" / "layers.md"
REFERENCES = ROOT / "dsa" / "reference" / "__init__.py"


def init() -> str:
    text = INIT.read_text()
    head, version = text[: text.index("from dsa.")], next(s for s in text.splitlines() if s.startswith("__version__"))
    return _names(head, public_names() | {"dsa.runtime.backends": list(BACKENDS)}, f"{version}\n\n")


def reference_init() -> str:
    text = REFERENCES.read_text()
    return _names(text[: text.index("from dsa.")], references())


def _names(head: str, imports: dict[str, list[str]], between: str = "") -> str:
    lines = "".join(_import(module, names) for module, names in imports.items())
    everything = sorted(name for names in imports.values() for name in names)
    listed = "".join(f'    "{name}",\n' for name in everything)
    return f"{head}{lines}\n{between}__all__ = [\n{listed}]\n"


def _import(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}\n"
    if len(line) <= 121:
        return line
    return f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")\n"


def ops() -> dict[Path, str]:
    """Return {path: text}. The docstring of dsa.ops.FAMILY must be "TITLE: description"."""
    families, tables, pages = [], [], {}
    for family, files in _families().items():
        title, about = inspect.getdoc(importlib.import_module(f"dsa.ops.{family}")).split(": ")
        families.append(f"- [{title}]({family}.md): {about}")
        rows, sections = [], []
        for name in sorted(files):
            function = getattr(dsa, name)
            kernels = ", ".join(f"{arch} ({ARCH_NAMES.get(arch, '')})" for arch in ARCHS.get(name, ())) or "PyTorch"
            what = _first_sentence(inspect.getdoc(function) or "")
            rows.append(f"| [`{name}`]({family}.md#{name}) | `{family}/{files[name]}` | {what} | {kernels} |")
            sections.append(section(f"## {name}", f"dsa.{name}", function, OPS))
        tables.append("\n".join([f"## {title}", "", *_OPS_COLUMNS, *rows]))
        pages[OPS / f"{family}.md"] = "\n".join([f"# {title}\n\nFamily `{family}`: {about}\n", *sections])
    return {OPS / "index.md": "\n\n".join([_OPS_HEAD + "\n".join(families), *tables]) + "\n"} | pages


_OPS_COLUMNS = "| op | file | what it computes | kernels |", "|---|---|---|---|"
_OPS_HEAD = """\
# Ops

Every public function of `dsa`; `python -m tests.generate` writes these pages from the docstrings. The last column names
the GPUs that have a kernel. Elsewhere, a CPU included, an op runs its PyTorch reference. The file is
`dsa/ops/FAMILY/OP.py`: [architecture.md](../../explanation/architecture.md#where-the-files-of-an-op-are) lists the
other files of the op, and `dsa bench OP` measures its functions.

## Families

"""


def layers() -> str:
    names = [name for name in dsa_layers.__all__ if callable(getattr(dsa_layers, name))]
    summaries = {name: _first_sentence(inspect.getdoc(getattr(dsa_layers, name))) for name in names}
    head = _LAYERS_HEAD + "".join(f"- [`{name}`](#{name.lower()}): {about}\n" for name, about in summaries.items())
    return "\n".join([head, *(section_with_members(name, getattr(dsa_layers, name), LAYERS.parent) for name in names)])


_LAYERS_HEAD = """\
# Layers

The public names of `dsa_layers`; `python -m tests.generate` writes this page from the docstrings. `SHIPPED_MODEL` is
the path of the small checkpoint that comes with dsa, a model of Python source.

"""


def _families() -> dict[str, dict[str, str]]:
    """Return {family: {public function: the file in dsa/ops/FAMILY that defines it}}."""
    found: dict[str, dict[str, str]] = {}
    for module in public_names():
        _, _, family, file = module.split(".")
        found.setdefault(family, {}).update(dict.fromkeys(ops_of(module), file))
    return found


def _first_sentence(doc: str) -> str:
    first = doc.split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return re.split(r"(?<=\S)\.\s+(?=[A-Za-z])", first)[0].rstrip(".:")


def main() -> None:
    INIT.write_text(init())
    REFERENCES.write_text(reference_init())
    importlib.reload(dsa)  # so that ops() finds names that are new in INIT
    for page, text in {**ops(), LAYERS: layers()}.items():
        page.write_text(text)
    status_table.PATH.write_text(status_table.dated(status_table.PATH.read_text()))
    tables.main()


if __name__ == "__main__":
    main()
