"""The steps of a tokenizer's decoder, each for tokens that come one by one.

A step takes a token's string and returns the strings that it is sure of; `flush` returns the others. All strings joined
are what the tokenizers library gives for all tokens at once. ByteLevel and Fuse make one string of all tokens, which
they return in pieces; only Strip can go on with pieces. Where any other step follows one that joins, and where the
library has a step that is not known here, tokens are held until the end.
"""

import codecs
import json
from typing import Protocol

from tokenizers import decoders

_REPLACEMENT = "\ufffd"
_JOINING = ("ByteLevel", "Fuse")


class DecodingStep(Protocol):
    def push(self, token: str) -> list[str]: ...

    def flush(self) -> list[str]: ...


def decoding_steps(decoder: decoders.Decoder | None) -> list[DecodingStep]:
    """The steps of `decoder`, in order, at their beginning. None is a tokenizer without one: spaces join its tokens."""
    if decoder is None:
        return [_Spaces()]
    fields = _flat(json.loads(decoder.__getstate__()))
    steps: list[DecodingStep] = []
    joined = False
    for i, field in enumerate(fields):
        step = _step(field, joined)
        if step is None:
            return [*steps, _Held(_of_library({"type": "Sequence", "decoders": fields[i:]}), joined)]
        steps.append(step)
        joined = joined or field["type"] in _JOINING
    return steps


def _flat(field: dict) -> list[dict]:
    if field["type"] != "Sequence":
        return [field]
    return [inner for part in field["decoders"] for inner in _flat(part)]


def _step(field: dict, joined: bool) -> DecodingStep | None:
    """None for a step that needs all tokens. joined: whether it gets one string in pieces."""
    kind = field["type"]
    if joined:
        return _StripPieces(field["content"], field["start"], field["stop"]) if kind == "Strip" else None
    if kind in ("Replace", "Strip"):
        return _EachToken(_of_library(field), looks_back=False)
    if kind in ("Metaspace", "WordPiece"):
        return _EachToken(_of_library(field), looks_back=True)
    return {"ByteFallback": _ByteFallback, "ByteLevel": _ByteLevel, "Fuse": _Fuse}.get(kind, lambda: None)()


def _of_library(field: dict) -> decoders.Decoder:
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(field).encode())
    return decoder


class _EachToken:
    """A step of the library that turns each token into one string. looks_back: the first token is another case."""

    def __init__(self, decoder: decoders.Decoder, *, looks_back: bool) -> None:
        self._decoder, self._looks_back = decoder, looks_back
        self._first = True

    def push(self, token: str) -> list[str]:
        before = [""] if self._looks_back and not self._first else []
        self._first = False
        return [self._decoder.decode([*before, token])]

    def flush(self) -> list[str]:
        return []


class _Spaces:
    def __init__(self) -> None:
        self._space = ""

    def push(self, token: str) -> list[str]:
        space, self._space = self._space, " "
        return [space + token]

    def flush(self) -> list[str]:
        return []


class _ByteFallback:
    """Bytes as <0xE2>. A run of them is one string of UTF-8 or, where any of it is invalid, a U+FFFD per byte: no
    piece of a run is sure before its end."""

    def __init__(self) -> None:
        self._decoder = decoders.ByteFallback()
        self._run: list[str] = []

    def push(self, token: str) -> list[str]:
        if self._decoder.decode([token]) != token:
            self._run.append(token)
            return []
        return [*self.flush(), token]

    def flush(self) -> list[str]:
        run, self._run = self._run, []
        if not run:
            return []
        text = self._decoder.decode(run)
        return list(text) if text == _REPLACEMENT * len(run) else [text]


class _ByteLevel:
    """Each character of a token is a byte, in GPT-2's alphabet; a token with another character is its own UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> list[str]:
        if all(character in _BYTES for character in token):
            return [self._utf8.decode(bytes(_BYTES[character] for character in token))]
        return [self._utf8.decode(token.encode())]

    def flush(self) -> list[str]:
        return [self._utf8.decode(b"", final=True)]


def _byte_alphabet() -> dict[str, int]:
    """Printable bytes are themselves; the others are the characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class _Fuse:
    def push(self, token: str) -> list[str]:
        return [token]

    def flush(self) -> list[str]:
        return []


class _StripPieces:
    """Strips one string that comes in pieces: `start` times `content` from its beginning, `stop` times from its end."""

    def __init__(self, content: str, start: int, stop: int) -> None:
        self._content, self._start, self._stop = content, start, stop
        self._end = ""  # at most `stop` times content, which the string may end in

    def push(self, token: str) -> list[str]:
        while self._start and token:
            if not token.startswith(self._content):
                self._start = 0
                break
            token = token[1:]
            self._start -= 1
        text = self._end + token
        at_end = len(text) - len(text.rstrip(self._content))
        kept = len(text) - min(at_end, self._stop)
        self._end = text[kept:]
        return [text[:kept]]

    def flush(self) -> list[str]:
        return []


class _Held:
    """All tokens until the end. joined: they are pieces of one string."""

    def __init__(self, decoder: decoders.Decoder, joined: bool) -> None:
        self._decoder, self._joined = decoder, joined
        self._tokens: list[str] = []

    def push(self, token: str) -> list[str]:
        self._tokens.append(token)
        return []

    def flush(self) -> list[str]:
        return [self._decoder.decode(["".join(self._tokens)] if self._joined else self._tokens)]
