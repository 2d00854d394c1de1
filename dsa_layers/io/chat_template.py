"""Chat templates: programs that come with checkpoints, run where they can do no harm.

jinja2's sandbox keeps a template from the machine, not from its time and memory: loops within loops, strings that
double, integers of a million digits and lists that hold each other are all inside it. So a template is compiled and
rendered in a process of its own (`chat_template_process`) which the operating system limits.
"""

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsa_layers.io.chat_template_process import MAX_CPU_SECONDS

_PROCESS = Path(__file__).with_name("chat_template_process.py")
_WALL_SECONDS = 20  # of a process that may compute for half a second: a busy machine is no hostile template


class ChatTemplateError(ValueError):
    """A template that cannot be compiled or rendered, or that takes more than it may."""


class UnknownVariable(ValueError):
    """`name` is no variable that the template reads; `known` are those."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(f"{name}: is no variable that the template reads")
        self.name, self.known = name, known


class ChatTemplate:
    """The template `source`. Whether it compiles turns out when it is rendered."""

    def __init__(self, source: str) -> None:
        self._source = source

    def render(self, variables: Mapping[str, Any], named: Sequence[str] = ()) -> str:
        """What the template makes of `variables`: strings, numbers, None, and sequences and mappings of them.

        Raises UnknownVariable for a name of `named` that it does not read, and ChatTemplateError if it does not
        compile, refuses the variables or fails, and after half a second of computing, at 200 MB of memory, or when the
        text has 2^19 characters more than 8 times what the variables have.
        """
        return _run({"source": self._source, "variables": variables, "named": [*named]})


def _run(asked: Mapping[str, Any]) -> str:
    try:
        request = json.dumps(asked, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"cannot be given its variables: {error}") from error
    if not sys.executable:
        raise ChatTemplateError("needs a process of its own, and sys.executable does not say which Python to start")
    command = [sys.executable, "-I", "-S", str(_PROCESS), *_libraries()]
    try:
        process = subprocess.run(
            command, input=request.encode("utf-8", "surrogatepass"), capture_output=True, timeout=_WALL_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise ChatTemplateError(f"takes more than {_WALL_SECONDS} seconds") from None
    except OSError as error:
        raise ChatTemplateError(f"needs a process of its own, and none can be started: {error}") from error
    if process.returncode == -signal.SIGPROF:
        raise ChatTemplateError(f"takes more than {MAX_CPU_SECONDS} s of computing")
    try:
        answer = json.loads(process.stdout.decode("utf-8", "surrogatepass"))
    except ValueError:
        last = process.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise ChatTemplateError(f"its process ended with {process.returncode}: {''.join(last)}") from None
    if "error" in answer:
        raise ChatTemplateError(answer["error"])
    if "unknown" in answer:
        raise UnknownVariable(answer["unknown"], answer["known"])
    return answer["text"]


def _plain(value: Any) -> Any:
    """What JSON has for a mapping or a sequence of another type than dict, list and tuple."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"must be made of strings, numbers, None, sequences and mappings, got {type(value).__name__}")


@lru_cache(maxsize=1)
def _libraries() -> tuple[str, ...]:
    """Where the process finds what it imports: nothing else of this process's path is for it."""
    specs = (importlib.util.find_spec(name) for name in ("jinja2", "markupsafe"))
    return tuple(dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs))
