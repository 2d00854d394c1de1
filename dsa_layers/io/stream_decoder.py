"""Token ids to text as the ids come one by one."""

from collections.abc import Callable

_REPLACEMENT = "\ufffd"  # what a decoder writes for the bytes of half a character


class StreamDecoder:
    """Decodes ids one by one. All pieces joined, with the piece of `flush`, are the text of all ids.

    A character can span several tokens, so text that ends in U+FFFD is held back until a token completes it. The
    previous piece's tokens are decoded again with the new ones, because the first token of a text can be special: some
    decoders strip its space.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """decode: turns ids into text, such as `Tokenizer.decode`."""
        self._decode = decode
        self._start()

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes: often a word, "" for a special token or half a character."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) or len(text) <= self._shown:
            return ""
        piece = text[self._shown :]
        self._ids = self._ids[self._context :]
        self._context, self._shown = len(self._ids), len(self._decode(self._ids))
        return piece

    def flush(self) -> str:
        """Return the text still held back: U+FFFD if the ids ended inside a character. The decoder then starts anew."""
        piece = self._decode(self._ids)[self._shown :]
        self._start()
        return piece

    def _start(self) -> None:
        self._ids: list[int] = []  # the previous piece's tokens, then those that have no text yet
        self._context = self._shown = 0  # the number of the former, and of their characters
