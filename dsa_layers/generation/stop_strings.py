"""Streamed text that ends at a stop string."""

from collections.abc import Sequence

from dsa_layers.arguments import shown
from dsa_layers.io.stream_decoder import StreamDecoder
from dsa_layers.io.tokenizer import Tokenizer


def check_stop_strings(stop: Sequence[str], tokenizer: Tokenizer) -> None:
    """Raise ValueError for the name of a special token: no text shows it, so it would end nothing."""
    for text in stop:
        if text in tokenizer.special_tokens:
            raise ValueError(f"stop: must not be a special token, which no text shows, got {shown(text)}")


class StopStrings:
    """Turns tokens into text to show, and watches for strings that end it.

    Text that may turn out to be the beginning of a stop string is held back until that is decided.
    decoder: None for a generator without a tokenizer, whose text is always empty.
    """

    def __init__(self, decoder: StreamDecoder | None, stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._held = ""

    def push(self, token: int, *, last: bool) -> tuple[str, bool]:
        """Returns (text that can be shown, whether a stop string was met). last: no token follows, so that nothing is
        held back."""
        if self._decoder is None:
            return "", False
        self._held += self._decoder.push(token)
        if last:
            self._held += self._decoder.flush()
        found = [at for text in self._stop if (at := self._held.find(text)) >= 0]
        keep = min(found) if found else len(self._held) - (0 if last else self._undecided())
        text, self._held = self._held[:keep], self._held[keep:]
        return text, bool(found)

    def finish(self) -> str:
        """The text that is still held back, for a sequence that ends without a token."""
        if self._decoder is None:
            return ""
        text, self._held = self._held + self._decoder.flush(), ""
        return text

    def _undecided(self) -> int:
        """The length of the longest end of the held text that begins a stop string."""
        return max(
            (
                n
                for text in self._stop
                for n in range(1, min(len(text), len(self._held) + 1))
                if self._held.endswith(text[:n])
            ),
            default=0,
        )
