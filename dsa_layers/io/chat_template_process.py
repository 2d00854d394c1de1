"""The process in which a chat template is compiled and rendered, within limits of the operating system.

Run as a script by `chat_template`, with the folders of jinja2 and markupsafe as arguments and without the site's
packages, so that it starts in 0.1 s. stdin: {"source", "variables", "named"} in JSON; stdout: {"text"}, {"error"}, or
{"unknown", "known"}: a name in "named" that the template does not read, and the names that it does.
"""

import json
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Any, ClassVar, NoReturn

MAX_CPU_SECONDS = 0.5
MAX_MEMORY = 200_000_000  # bytes
# Beside what the variables hold, which a template may write several times: each character can become a token.
MAX_CHARACTERS = 2**19
_MAX_REPEATS = 8
_MAX_ERROR = 500


def main() -> None:
    sys.path.extend(sys.argv[1:])
    from jinja2 import TemplateError, TemplateSyntaxError

    request = json.loads(sys.stdin.buffer.read().decode("utf-8", "surrogatepass"))
    _limit()
    try:
        answer = _render(**request)
    except MemoryError:
        answer = {"error": f"needs more than {MAX_MEMORY // 10**6} MB of memory"}
    except RecursionError:
        answer = {"error": "is nested too deeply"}
    except Exception as error:  # a template can raise whatever Python does
        problem = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        if isinstance(error, TemplateSyntaxError):
            problem = f"line {error.lineno}: {error.message}"
        answer = {"error": "".join(filter(str.isprintable, " ".join(problem.split())))[:_MAX_ERROR]}
    sys.stdout.buffer.write(json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass"))


def _limit() -> None:
    try:
        import resource
    except ImportError:  # no POSIX: the calling process still ends this one after a while
        return
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    except (OSError, ValueError):  # it is lower already, or the system knows no such limit
        pass
    # Ends the process wherever it is. The time that starting took does not count.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS)


def _render(source: str, variables: dict[str, Any], named: list[str]) -> dict[str, Any]:
    import jinja2
    from jinja2.ext import Extension
    from jinja2.meta import find_undeclared_variables
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}: marks what the assistant wrote, for training; a prompt has the block as it is."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.CallBlock:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_block"), [], [], body).set_lineno(line)

        def _block(self, caller: Callable[[], str]) -> str:
            return caller()

    # The environment that chat templates are written for: transformers' own.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = _strftime_now
    if named:
        known = find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
        if unknown := [name for name in named if name not in known]:
            return {"unknown": unknown[0], "known": sorted(known)}
    template = environment.from_string(source)
    pieces, characters = [], 0
    given = json.dumps(variables, ensure_ascii=False)
    most = MAX_CHARACTERS + _MAX_REPEATS * len(given)
    for piece in template.generate(variables):
        pieces.append(piece)
        characters += len(piece)
        if characters > most:
            raise jinja2.TemplateError(f"writes more than {most} characters")
    text = "".join(pieces)
    if _has_surrogates(text) and not _has_surrogates(given):
        raise jinja2.TemplateError("writes surrogates, which are not Unicode text")
    return {"text": text}


def _has_surrogates(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _to_json(value: Any, **options: Any) -> str:
    # jinja2's own escapes <, >, & and ' for HTML; a prompt is no HTML.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


if __name__ == "__main__":
    main()
