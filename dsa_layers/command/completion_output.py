"""How completions are shown as they come: text for one prompt, numbered lines for several, events in JSON."""

import os
from typing import Protocol, TextIO

from dsa_layers.command.streams import say_json
from dsa_layers.generation.results import Completion, TokenEvent

_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"


class CompletionOutput(Protocol):
    """What the command tells about each sequence, in this order."""

    def prompt(self, sequence: int, text: str) -> None:
        """The prompt as it is shown; what is generated follows it directly."""

    def event(self, event: TokenEvent) -> None:
        """A token, or the end of a sequence."""

    def completion(self, sequence: int, prompt: str, completion: Completion) -> None:
        """The sequence has ended."""

    def close(self) -> None:
        """Nothing follows; also after an interrupt."""


class StreamedText:
    """The prompt, bold on a terminal, and what follows it, token by token."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._bold = stream, styled(stream)
        self._open = False

    def prompt(self, sequence: int, text: str) -> None:
        self._open = True
        self._write(f"{_BOLD}{text}{_PLAIN}" if self._bold else text)

    def event(self, event: TokenEvent) -> None:
        self._write(event.text)

    def completion(self, sequence: int, prompt: str, completion: Completion) -> None:
        pass

    def close(self) -> None:
        if self._open:
            self._write("\n")

    def _write(self, text: str) -> None:
        print(text, end="", file=self._stream, flush=True)


class NumberedLines:
    """The lines of several sequences as each is complete, behind its sequence's number: "[0] def f(x):".

    Sequences take turns by whole lines, so that a terminal stays readable and `grep '^\\[0\\]'` finds one sequence.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._bold = stream, styled(stream)
        self._unfinished: dict[int, list[str]] = {}  # the pieces of each sequence's line

    def prompt(self, sequence: int, text: str) -> None:
        # A style ends with its line: lines of other sequences come in between.
        lines = [f"{_BOLD}{line}{_PLAIN}" if self._bold and line else line for line in text.split("\n")]
        self._add(sequence, "\n".join(lines))

    def event(self, event: TokenEvent) -> None:
        self._add(event.sequence, event.text)

    def completion(self, sequence: int, prompt: str, completion: Completion) -> None:
        self._end(sequence)

    def close(self) -> None:
        for sequence in self._unfinished:
            self._end(sequence)

    def _end(self, sequence: int) -> None:
        if any(self._unfinished[sequence]):
            self._end_line(sequence)

    def _add(self, sequence: int, text: str) -> None:
        first, *others = text.split("\n")
        self._unfinished.setdefault(sequence, []).append(first)
        for piece in others:
            self._end_line(sequence)
            self._unfinished[sequence].append(piece)

    def _end_line(self, sequence: int) -> None:
        line, self._unfinished[sequence] = "".join(self._unfinished[sequence]), []
        print(f"[{sequence}] {line}", file=self._stream, flush=True)


class JsonEvents:
    """One JSON object a line: an event "token" for every token, and "completion" when a sequence has ended."""

    def prompt(self, sequence: int, text: str) -> None:
        pass

    def event(self, event: TokenEvent) -> None:
        fields = {"sequence": event.sequence, "token": event.token, "text": event.text}
        if event.logprobs is not None:
            fields["logprobs"] = [{"token": token} | own._asdict() for token, own in event.logprobs.items()]
        say_json("token", **fields)

    def completion(self, sequence: int, prompt: str, completion: Completion) -> None:
        say_json(
            "completion",
            sequence=sequence,
            prompt=prompt,
            prompt_tokens=completion.prompt_tokens,
            text=completion.text,
            tokens=completion.tokens,
            finish_reason=completion.finish_reason,
            error=completion.error,
        )

    def close(self) -> None:
        pass


def styled(stream: TextIO) -> bool:
    """Whether the stream is a terminal that knows styles, and nobody asked for none."""
    return stream.isatty() and os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")
