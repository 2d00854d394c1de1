"""Token ids to text as they come one by one."""

from collections.abc import Callable
from pathlib import Path

from tokenizers import decoders

from dsa_layers.io.decoding_steps import decoding_steps
from dsa_layers.io.tokenizer_failures import tokenizer_failures


class StreamDecoder:
    """Decodes ids one by one; the pieces joined, with `flush`'s, are what `Tokenizer.decode` gives for all of them.

    Text is returned as soon as no later token can change it. A character can span several tokens: its bytes are held
    back until it is complete or known to be invalid. A tokenizer with byte fallback changes a whole run of bytes if one
    of them is invalid, so the run is held back until another token ends it. The work per token does not grow with the
    text. Raises TokenizerError if the tokenizer cannot decode a token.
    """

    def __init__(self, path: Path, token_text: Callable[[int], str | None], decoder: decoders.Decoder | None) -> None:
        """path: the tokenizer's file, for errors. token_text: a token's string, None for one that is left out. decoder:
        that of the tokenizers library."""
        self._path, self._token_text, self._decoder = path, token_text, decoder
        self._steps = decoding_steps(decoder)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: often a word, "" for a special token or half a character."""
        token = self._token_text(token_id)
        if token is None:
            return ""
        with tokenizer_failures(f"{self._path}: cannot decode id {token_id}"):
            return self._through(0, [token])

    def flush(self) -> str:
        """The text still held back: U+FFFD if the ids ended inside a character. The decoder then starts afresh."""
        steps, text = self._steps, ""
        with tokenizer_failures(f"{self._path}: cannot decode the last ids"):
            for i, step in enumerate(steps):
                text += self._through(i + 1, step.flush())
        self._steps = decoding_steps(self._decoder)
        return text

    def _through(self, first: int, tokens: list[str]) -> str:
        """What the steps from number `first` on return for `tokens`."""
        for step in self._steps[first:]:
            tokens = [text for token in tokens for text in step.push(token)]
        return "".join(tokens)
