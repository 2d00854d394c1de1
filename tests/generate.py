"""Write what is made from the code and the GPU receipt: the public names in dsa/__init__.py and
dsa/reference/__init__.py, docs/reference/ops/, docs/reference/layers.md, and the tables of all documents.

usage: python -m tests.generate

A bridge says in `__all__` which names it gives to dsa; its ops' declarations say which kernels there are. So a new op
is in no list that somebody keeps by hand. tests/test_generated.py fails where a file is not what this writes.
"""

import importlib
import inspect
import re
from pathlib import Path

import dsa.ops
import dsa_layers
from docs.api_pages import class_section, section
from dsa.runtime.backends import ARCH_NAMES, ARCHS
from tests.gpu import status_table, tables
from tests.public_names import BACKENDS, ROOT, ops_of, public_names, references

INIT, OPS = ROOT / "dsa" / "__init__.py", ROOT / "docs" / "reference" / "ops"
LAYERS = ROOT / "docs" / "reference" / "layers.md"
REFERENCES = ROOT / "dsa" / "reference" / "__init__.py"


def init() -> str:
    """dsa/__init__.py: its head stays, imports and `__all__` are made."""
    text = INIT.read_text()
    head, version = text[: text.index("from dsa.")], next(s for s in text.splitlines() if s.startswith("__version__"))
    return _names(head, {"dsa.runtime.backends": list(BACKENDS)} | public_names(), f"{version}\n\n")


def reference_init() -> str:
    """dsa/reference/__init__.py in the same way."""
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
    """The pages of OPS: index.md with a line for every public function, and a page a family with the docstrings."""
    lists, tables, pages = [], [], {}
    for family, files in _families().items():
        about = inspect.getdoc(importlib.import_module(f"dsa.ops.{family}"))
        lists.append(f"- [{family}]({family}.md): {about}")
        tables.append(f"## {family}\n\n| op | file | what it computes | kernels |\n|---|---|---|---|")
        parts = [f"# {family}\n\n{about}\n"]
        for name in sorted(files):
            function = getattr(dsa, name)
            kernels = ", ".join(f"{arch} ({ARCH_NAMES.get(arch, '')})" for arch in ARCHS.get(name, ())) or "PyTorch"
            what = _first_sentence(inspect.getdoc(function) or "")
            tables[-1] += f"\n| [`{name}`]({family}.md#{name}) | `{family}/{files[name]}` | {what} | {kernels} |"
            parts.append(section(f"## {name}", f"dsa.{name}", function, OPS))
        pages[OPS / f"{family}.md"] = "\n".join(parts)
    return {OPS / "index.md": "\n\n".join([_OPS_HEAD + "\n".join(lists), *tables]) + "\n"} | pages


_OPS_HEAD = """\
# Ops

Every public function of `dsa`, from its docstring; `python -m tests.generate` writes these pages. An op without a
kernel for the GPU at hand runs its PyTorch reference; so does every op on a CPU. A file is FAMILY/OP of
[architecture.md](../../explanation/architecture.md#one-rule-for-where-things-are); `dsa bench OP` measures its
functions.

## Families

"""


def layers() -> str:
    """LAYERS: the public names of `dsa_layers`, with the public methods of classes."""
    names = [name for name in dsa_layers.__all__ if callable(getattr(dsa_layers, name))]
    summaries = {name: _first_sentence(inspect.getdoc(getattr(dsa_layers, name))) for name in names}
    head = _LAYERS_HEAD + "".join(f"- [`{name}`](#{name.lower()}): {about}\n" for name, about in summaries.items())
    return "\n".join([head, *(class_section(name, getattr(dsa_layers, name), LAYERS.parent) for name in names)])


_LAYERS_HEAD = """\
# Layers

The public names of `dsa_layers`, from their docstrings; `python -m tests.generate` writes this page. `SHIPPED_MODEL` is
the path of the checkpoint of a small model of Python source that comes with dsa.

"""


def _families() -> dict[str, dict[str, str]]:
    """{family: {function: the name of its bridge's file}}."""
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
    importlib.reload(dsa)  # with the new names
    for page, text in {**ops(), LAYERS: layers()}.items():
        page.write_text(text)
    status_table.PATH.write_text(status_table.dated(status_table.PATH.read_text()))
    tables.main()


if __name__ == "__main__":
    main()
