"""Render chat templates in jinja2's sandbox: checkpoints' templates, and dsa's own if a release has no template.

The sandbox denies a template access to files, modules and private attributes of Python objects. It limits neither time
nor memory. As in transformers, templates have loop controls, the tag `generation`, the filter `tojson`, and the
functions `raise_exception` and `strftime_now`.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dsa_layers.errors import TokenizerError

_FOLDER = Path(__file__).parent / "chat_formats"
# dsa's own templates, called formats: {model_type in config.json: file}. The releases of these models have an encoder
# in Python instead of a template.
FORMATS = {model_type: _FOLDER / f"{model_type}.jinja" for model_type in ("deepseek_v32", "deepseek_v4")}
# Tokens that every format writes. A format is used only if the tokenizer's added tokens include them.
NEEDED = ("<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")

_MAX_ERROR = 500  # maximum characters of a template's error message, which can have any length


def format_source(path: Path) -> str:
    """Return the text of the format in the file `path`, preceded by the macros that all formats share."""
    return (_FOLDER / "markup.jinja").read_text(encoding="utf-8") + path.read_text(encoding="utf-8")


def render(path: Path, source: str, variables: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Render the template `source` with `variables` and `options`.

    path: the template's file, which error messages name
    Raises TokenizerError if the template does not compile, raises an exception, or never reads one of `options`.
    """
    try:
        template, read = _compiled(source)
        text = template.render({**variables, **options})
    except Exception as error:  # a template can raise any exception
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        if isinstance(error, jinja2.TemplateSyntaxError):
            kind = f"line {error.lineno}: "
        message = " ".join(str(error).split())[:_MAX_ERROR]
        raise TokenizerError(f"{path}: chat template: {kind}{message}") from error
    for name in options:
        if name not in read:
            accepted = ", ".join(sorted(read - variables.keys())) or "none"
            raise TokenizerError(f"{name}: is no variable of the chat template; accepted: {accepted}")
    return text


class _Generation(Extension):
    """The tag `generation`, which marks the assistant's text for training. Here, the text inside the tag is rendered
    without marks."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@lru_cache(maxsize=4)
def _compiled(source: str) -> tuple[jinja2.Template, set[str]]:
    """Return the compiled template and the names of the variables that it reads."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters |= {"tojson": _to_json, "from_json": _from_json}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
    }
    read = find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
    return environment.from_string(source), read


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return a value as JSON. Unlike jinja2's own filter `tojson`, do not escape <, >, & and ' for HTML."""
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _from_json(text: str) -> Any:
    """Parse JSON text. Return None for invalid JSON. Only the formats in `FORMATS` use this filter."""
    try:
        return json.loads(text)
    except ValueError:
        return None
