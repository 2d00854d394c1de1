"""Render chat templates in jinja2's sandbox: checkpoints' templates, and dsa's own if a release has no template.

The sandbox denies a template access to files, modules and private attributes of Python objects. It limits neither time
nor memory. Templates are written for transformers, so the jinja2 environment has transformers' options, filters and
functions, but not its tag `generation`.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dsa_layers.errors import TokenizerError

_FOLDER = Path(__file__).parent / "chat_formats"
# The formats, dsa's own templates: {model_type in config.json: file}. The releases of these models have an encoder in
# Python instead of a template.
FORMATS = {model_type: _FOLDER / f"{model_type}.jinja" for model_type in ("deepseek_v32", "deepseek_v4")}
# Tokens that every format needs. A format is used only if the model's tokenizer has all these tokens.
NEEDED = ("<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")

_MAX_ERROR = 500  # maximum characters of an error message, because a template can raise any message


def format_source(path: Path) -> str:
    """Return the text of a format: the macros that all formats share, followed by the file `path`."""
    return (_FOLDER / "markup.jinja").read_text(encoding="utf-8") + path.read_text(encoding="utf-8")


def render(path: Path, source: str, variables: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Render the template `source` with `variables` and the caller's `options`.

    path: the template's file, which error messages name
    Raises TokenizerError if the template does not compile, refuses the variables, fails, or ignores one of `options`.
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


@lru_cache(maxsize=4)
def _compiled(source: str) -> tuple[jinja2.Template, set[str]]:
    """Compile a template. Return the template and the names of the variables that it reads."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
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


def _to_json(value: Any, **options: Any) -> str:
    """Return a value as JSON. The characters <, >, & and ' stay unchanged; jinja2's `tojson` filter would escape them
    for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _from_json(text: str) -> Any:
    """Parse JSON text. Return None for invalid JSON. This filter is for the formats in `FORMATS`; transformers does not
    have it."""
    try:
        return json.loads(text)
    except ValueError:
        return None
