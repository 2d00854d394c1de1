"""Chat templates: programs that come with checkpoints, rendered in jinja2's sandbox.

The sandbox keeps a template from files, modules and attributes of Python objects. It does not limit time and memory.
The environment is the one that templates are written for, transformers' own.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

# The longest prompt that a template may write. Each character can become a token, and a template may write its
# variables several times.
_MAX_CHARACTERS = 2**19
_MAX_REPEATS = 8
_MAX_ERROR = 500


class ChatTemplateError(ValueError):
    """A template that cannot be compiled or rendered, or that writes too much."""


class UnknownVariable(ValueError):
    """`name` is no variable that the template reads; `known` are those."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(f"{name}: is no variable that the template reads")
        self.name, self.known = name, known


class _Generation(Extension):
    """{% generation %} marks what the assistant wrote, for training. A prompt has the block as it is."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_block"), [], [], body).set_lineno(line)

    def _block(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


class ChatTemplate:
    """The template `source`. It is compiled when it is first rendered."""

    def __init__(self, source: str) -> None:
        self._source = source

    def render(self, variables: Mapping[str, Any], named: Sequence[str] = ()) -> str:
        """Return the text that the template makes of `variables`: strings, numbers, None, and sequences and mappings
        of them.

        Raises UnknownVariable for a name in `named` that the template does not read. Raises ChatTemplateError if it
        does not compile, refuses the variables or fails, and if the text has 2^19 characters more than 8 times what the
        variables have.
        """
        given = _as_json(variables)
        try:
            if unknown := [name for name in named if name not in self._known]:
                raise UnknownVariable(unknown[0], sorted(self._known))
            text = _joined(self._template.generate(json.loads(given)), _MAX_CHARACTERS + _MAX_REPEATS * len(given))
        except UnknownVariable:
            raise
        except Exception as error:  # a template can raise whatever Python does
            raise ChatTemplateError(_problem(error)) from error
        if _has_surrogates(text) and not _has_surrogates(given):
            raise ChatTemplateError("writes surrogates, which are not Unicode text")
        return text

    @cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self._source)

    @cached_property
    def _known(self) -> set[str]:
        environment = _environment()
        return find_undeclared_variables(environment.parse(self._source)) - environment.globals.keys()


def _as_json(variables: Mapping[str, Any]) -> str:
    """A template gets plain values only: those that JSON has."""
    try:
        return json.dumps(dict(variables), ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"cannot be given its variables: {error}") from error


def _plain(value: Any) -> Any:
    """What JSON has for a mapping or a sequence of another type than dict, list and tuple."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"must be made of strings, numbers, None, sequences and mappings, got {type(value).__name__}")


def _joined(pieces: Any, most: int) -> str:
    found, characters = [], 0
    for piece in pieces:
        found.append(piece)
        characters += len(piece)
        if characters > most:
            raise jinja2.TemplateError(f"writes more than {most} characters")
    return "".join(found)


def _problem(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "needs more memory than there is"
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if isinstance(error, jinja2.TemplateSyntaxError):
        text = f"line {error.lineno}: {error.message}"
    else:
        text = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
    return "".join(filter(str.isprintable, " ".join(text.split())))[:_MAX_ERROR]


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, **options: Any) -> str:
    # jinja2's own escapes <, >, & and ' for HTML; a prompt is no HTML.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
