"""Convert signatures and docstrings of functions and classes to Markdown, for the pages of tests/generate.py."""

import inspect
import os
import re
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

from tests.public_names import ROOT

# {pattern: replacement}, to shorten signatures
SHORTER = {
    r"\b(?:[a-z_]\w*\.)+(?=[A-Z])": "",
    r"<[^<>]+>": "...",  # the repr of a default value that is not a literal
    r": '([^']*)'": r": \1",  # quotes around an annotation
    r" -> None$": "",
}
CODE = r"(`[^`]*`)"
MARKUP = r"(\*(?! )|(?<! )\*|<(?=[\w/!])|(?<!\w)_|_(?!\w)|(?<=\])\()"  # characters that Markdown would interpret
LINE_MARKUP = r"^(?=[-+#>|] |\d+[.)] )"
# A paragraph keeps its line breaks if it begins with a formula, or contains columns or an indented line.
VERBATIM = r"\A\S[^.:;]{,60} = |^ |\S  +\S"
NEW_PARAGRAPH = r"(?<=[.:])\n(?=(Returns|Raises|On Hopper|Source)\b)"


def section(heading: str, name: str, value: Any, folder: Path) -> str:
    """Return the Markdown of a function or class: `heading`, a link to the source file, the signature, the docstring.
    folder: the page's folder, to which the link is relative."""
    file = Path(inspect.getsourcefile(inspect.unwrap(value))).relative_to(ROOT)
    source = f"Source: [{file}]({os.path.relpath(ROOT / file, folder)})"
    return "\n\n".join([heading, source, _signature(name, value), _docstring(value)]) + "\n"


def section_with_members(name: str, value: Any, folder: Path) -> str:
    parts = [section(f"## {name}", f"dsa_layers.{name}", value, folder)]
    if inspect.isclass(value):
        members = {member: _member(value, member) for member in vars(value) if not member.startswith("_")}
        parts += [f"### {name}.{member}\n\n{text}\n" for member, text in members.items() if text]
    return "\n".join(parts)


def _member(owner: type, name: str) -> str:
    """Return the Markdown of a method, or of a property that has a docstring. Return "" for other members."""
    member = vars(owner)[name]
    if isinstance(member, FunctionType | classmethod):
        return "\n\n".join(filter(None, [_signature(name, getattr(owner, name)), _docstring(member)]))
    return _docstring(member) if isinstance(member, property | cached_property) else ""


def _signature(name: str, value: Any) -> str:
    """Return the signature as a code block, without private parameters. If name and signature are longer than 100
    characters, each parameter has a line. For a Protocol, return only the line that begins the class."""
    if getattr(value, "_is_protocol", False):
        return f"```py\nclass {name}(Protocol)\n```"
    found = inspect.signature(value)
    public = [parameter for parameter in found.parameters.values() if not parameter.name.startswith("_")]
    text = str(found.replace(parameters=public))
    for pattern, replacement in SHORTER.items():
        text = re.sub(pattern, replacement, text)
    if len(name + text) > 100:
        parameters, result = re.fullmatch(r"\((.*)\)( -> .*)?", text).groups("")
        lines = re.sub(r", (?=\w+: |\*)", ",\n    ", parameters)
        text = f"(\n    {lines},\n){result}"
    return f"```py\n{name}{text}\n```"


def _docstring(value: Any) -> str:
    """Return a docstring's prose as Markdown paragraphs, and its formulas, columns and examples as text blocks."""
    text = re.sub(NEW_PARAGRAPH, "\n\n", inspect.cleandoc(value.__doc__ or ""))
    return "\n\n".join(_paragraph(paragraph) for paragraph in text.split("\n\n"))


def _paragraph(text: str) -> str:
    if re.search(VERBATIM, text, re.M):
        return f"```text\n{text}\n```"
    text = re.sub(f"{CODE}|{MARKUP}", lambda found: found[1] or "\\" + found[2], text)
    return re.sub(LINE_MARKUP, r"\\", text, flags=re.M)
