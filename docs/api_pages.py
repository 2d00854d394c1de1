"""Functions and classes as Markdown: heading, link to the source, signature, docstring."""

import inspect
import os
import re
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).parent.parent
MODULES = r"\b(?:[a-z_]\w*\.)+(?=[A-Z])"  # in front of a class
MARKS = r"(`[^`]*`)|(\*(?! )|(?<! )\*|<(?=[\w/!])|(?<!\w)_|_(?!\w)|(?<=\])\()"  # of Markdown, in front of them code
SHORT = {MODULES: "", r"<[^<>]+>": "...", r": '([^']*)'": r": \1", r" -> None$": ""}


def section(heading: str, name: str, value: Any, folder: Path) -> str:
    """A function or class, for a page in `folder`. `name` begins its signature."""
    file = Path(inspect.getsourcefile(inspect.unwrap(value))).relative_to(ROOT)
    parts = [heading, f"Source: [{file}]({os.path.relpath(ROOT / file, folder)})", _signature(name, value)]
    return "\n\n".join([*parts, _docstring(value)]) + "\n"


def class_section(name: str, value: Any, folder: Path) -> str:
    """Of a public name of dsa_layers: a function, or a class with its public methods and documented properties."""
    parts = [section(f"## {name}", f"dsa_layers.{name}", value, folder)]
    for method, member in vars(value).items() if inspect.isclass(value) else ():
        if method.startswith("_"):
            continue
        call = _signature(method, getattr(value, method)) if isinstance(member, FunctionType | classmethod) else ""
        if call or (isinstance(member, property | cached_property) and member.__doc__):
            parts.append("\n\n".join(filter(None, [f"### {name}.{method}", call, _docstring(member)])) + "\n")
    return "\n".join(parts)


def _signature(name: str, value: Any) -> str:
    """On one line, or a parameter a line where that is too long."""
    if getattr(value, "_is_protocol", False):
        return f"```py\nclass {name}(Protocol)\n```"
    found = inspect.signature(value)
    text = str(found.replace(parameters=[p for p in found.parameters.values() if not p.name.startswith("_")]))
    for pattern, short in SHORT.items():
        text = re.sub(pattern, short, text)
    if len(name + text) > 100:
        arguments, result = re.fullmatch(r"\((.*)\)( -> .*)?", text).groups("")
        text = "(\n    " + re.sub(r", (?=\w+: |\*)", ",\n    ", arguments) + f",\n){result}"
    return f"```py\n{name}{text}\n```"


def _docstring(value: Any) -> str:
    """Prose as paragraphs; formulas, columns and examples as they are."""
    text = re.sub(r"(?<=[.:])\n(?=(Returns|Raises|On Hopper|Source)\b)", "\n\n", inspect.cleandoc(value.__doc__ or ""))
    return "\n\n".join(_paragraph(paragraph) for paragraph in text.split("\n\n"))


def _paragraph(text: str) -> str:
    if re.search(r"\A\S[^.:;]{,60} = |^ |\S  +\S", text, re.M):
        return f"```text\n{text}\n```"
    text = re.sub(MARKS, lambda found: found[1] or "\\" + found[2], text)
    return re.sub(r"^(?=[-+#>|] |\d+[.)] )", r"\\", text, flags=re.M)
