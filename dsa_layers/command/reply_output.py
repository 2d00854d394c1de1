"""How a reply is shown as it comes."""

from typing import TextIO

from dsa_layers.command.completion_output import styled
from dsa_layers.command.reply import BEGIN_REASONING, END_REASONING

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class ReplyOutput:
    """The answer as it is; on a terminal the reasoning dimmed before it, elsewhere between its marks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begin, self._end = (_DIM, f"{_PLAIN}\n\n") if styled(stream) else (BEGIN_REASONING, END_REASONING)
        self._reasons = False

    def show(self, pieces: list[tuple[bool, str]]) -> None:
        """Pieces as `Reply.push` returns them."""
        for reasons, text in pieces:
            if reasons != self._reasons:
                self._write(self._begin if reasons else self._end)
            self._reasons = reasons
            self._write(text)

    def close(self) -> None:
        """Nothing follows; also after an interrupt."""
        self._write(f"{self._end.strip()}\n" if self._reasons else "\n")

    def _write(self, text: str) -> None:
        print(text, end="", file=self._stream, flush=True)
