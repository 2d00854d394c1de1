"""Text to token ids and back, with the tokenizer and the chat template that a checkpoint carries."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

_REPLACEMENT = "\ufffd"


class TokenizerError(ValueError):
    """A tokenizer or chat template that cannot be used. Names the file, what it holds and what is accepted."""


class Tokenizer:
    """The tokenizer in a checkpoint directory: tokenizer.json, and tokenizer_config.json for its special tokens.

    bos_token_id, eos_token_id: None if tokenizer_config.json names no such token.
    The chat template is chat_template.jinja if there is one, else tokenizer_config.json's `chat_template`: a string, or
    a list of {"name", "template"} of which "default" is taken. It is a program that came with the checkpoint; it runs
    in jinja2's sandbox.
    Raises TokenizerError (a ValueError) that names the file that is missing or malformed.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        directory = Path(directory)
        tokenizer_path, config_path = directory / "tokenizer.json", directory / "tokenizer_config.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(_read_text(tokenizer_path))
        except TokenizerError:
            raise
        except Exception as error:  # the only type that the library raises
            raise TokenizerError(f"{tokenizer_path}: not a tokenizer: {error}") from error
        try:
            config = json.loads(_read_text(config_path))
        except json.JSONDecodeError as error:
            raise TokenizerError(f"{config_path}: not valid JSON: {error}") from error
        if not isinstance(config, dict):
            raise TokenizerError(f"{config_path}: must hold a JSON object, got {type(config).__name__}")

        # The ending also has "add_bos_token": true, which is no token.
        named = {
            name: value
            for name, value in config.items()
            if name.endswith("_token") and value not in (None, True, False)
        }
        self._special = {name: _token_text(config_path, name, value) for name, value in named.items()}
        self.bos_token_id = self._token_id("bos_token", config_path)
        self.eos_token_id = self._token_id("eos_token", config_path)
        template_path = directory / "chat_template.jinja"
        if template_path.exists():
            template, self._template_path = _read_text(template_path), template_path
        else:
            template, self._template_path = _chat_template(config_path, config), config_path
        self._template = None if template is None else self._compile(template)
        added = self._tokenizer.get_added_tokens_decoder()
        self._skipped = {token_id for token_id, token in added.items() if token.special}

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included. The model may have more rows than that."""
        return self._tokenizer.get_vocab_size()

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of `text`; special tokens that are spelled out in it become their ids.

        add_bos puts the beginning-of-sequence id in front if there is one and the text does not begin with it already.
        What tokenizer.json would itself add around a text is left out, so BOS never comes twice and EOS never at all.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens and ids that are no token. Invalid UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> "StreamDecoder":
        """A decoder for ids that come one by one."""
        return StreamDecoder(self)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt for `messages`, each {"role": ..., "content": ...}, by the checkpoint's chat template.

        add_generation_prompt ends it where the assistant's answer begins. Templates write BOS themselves, as text.
        Raises TokenizerError if there is no template or if it refuses the messages.
        """
        if self._template is None:
            raise TokenizerError(f"{self._template_path}: holds no chat_template, and there is no chat_template.jinja")
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TokenizerError(f"{self._template_path}: chat template: {error}") from error

    def emits_text(self, token_id: int) -> bool:
        """False for the ids that `decode` leaves out."""
        return token_id not in self._skipped and self._tokenizer.id_to_token(token_id) is not None

    def _token_id(self, name: str, path: Path) -> int | None:
        text = self._special.get(name)
        token_id = None if text is None else self._tokenizer.token_to_id(text)
        if text is not None and token_id is None:
            raise TokenizerError(f"{path}: {name} {text!r} is no token of {path.with_name('tokenizer.json')}")
        return token_id

    def _compile(self, source: str) -> jinja2.Template:
        # The environment that chat templates are written for: transformers' own.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"{self._template_path}: chat template: {error}") from error


class StreamDecoder:
    """Decodes ids one by one; the pieces joined, with `flush`'s, are what `Tokenizer.decode` gives for all of them.

    A character can span several tokens: its bytes are held back until it is complete or known to be invalid. Each push
    decodes a window of the last tokens, not the whole text. Exact for byte-level tokenizers, DeepSeek's kind.
    """

    # A window grows only while the text ends in invalid UTF-8; beyond this many tokens its beginning is cut off.
    _MAX_WINDOW = 16

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context = 0  # the first tokens of the window: returned in full, kept for decoders that look back
        self._returned = 0  # characters of the window's text

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: often a word, "" for a special token or half a character."""
        if not self._tokenizer.emits_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        # An unfinished character shows as one U+FFFD at the end. Those before it are final.
        held = text.endswith(_REPLACEMENT)
        piece = text[self._returned : len(text) - held]
        self._returned += len(piece)
        if not held:
            self._drop(self._context)
            self._context = len(self._window)
        elif len(self._window) > self._MAX_WINDOW:
            self._cut(text)
        return piece

    def flush(self) -> str:
        """The text still held back: U+FFFD if the ids ended inside a character. The decoder then starts afresh."""
        rest = self._tokenizer.decode(self._window)[self._returned :]
        self._window, self._context, self._returned = [], 0, 0
        return rest

    def _drop(self, tokens: int) -> None:
        """Forgets the first tokens of the window, whose text has been returned."""
        self._returned -= len(self._tokenizer.decode(self._window[:tokens]))
        del self._window[:tokens]

    def _cut(self, text: str) -> None:
        # Where the two sides decode to the whole, no character lies across the cut.
        for tokens in range(len(self._window) - 1, 0, -1):
            sides = (self._window[:tokens], self._window[tokens:])
            if "".join(map(self._tokenizer.decode, sides)) == text:
                self._drop(tokens)
                self._context = 0
                return


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise TokenizerError(f"{path}: no such file; a checkpoint needs it to turn text into tokens") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error


def _token_text(path: Path, name: str, value: Any) -> str:
    """A special token's text, written as a string or as {"content": ...}."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise TokenizerError(f"{path}: {name} is {value!r}; accepted: a string, an object with 'content', or null")
    return text


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if "default" not in named:
            raise TokenizerError(f"{path}: chat_template names {list(named)}; accepted: a list with 'default'")
        template = named["default"]
    if template is not None and not isinstance(template, str):
        raise TokenizerError(f"{path}: chat_template is {template!r}; accepted: a string or a list of named strings")
    return template


def _to_json(value: Any, **options: Any) -> str:
    # jinja2's own escapes <, >, & and ' for HTML; a prompt is no HTML.
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
