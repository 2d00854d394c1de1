"""Text to token ids and back, with the tokenizer and the chat template of a checkpoint."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers

from dsa_layers.arguments import instance, shown, shown_json
from dsa_layers.errors import TokenizerError
from dsa_layers.io.chat_template import FORMATS, NEEDED, format_source, render
from dsa_layers.io.directory import checkpoint_directory
from dsa_layers.untrusted_files import is_there, read_json_object, read_text

# Bytes. The largest published tokenizer.json has 35 MB.
_MAX_TOKENIZER = 2**26
_MAX_CONFIG = 2**23
_MAX_TEMPLATE = 2**20

_REPLACEMENT = "\ufffd"  # what a decoder writes for the bytes of half a character
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Tokenizer:
    """The tokenizer of a checkpoint's directory or hub id: tokenizer.json, and tokenizer_config.json for its special
    tokens.

    bos_token_id, eos_token_id: None if tokenizer_config.json names no such token.
    special_tokens: the texts of the tokens that `decode` leaves out.
    has_chat_template: whether `apply_chat_template` has a template.
    The chat template is chat_template.jinja if there is one, else tokenizer_config.json's `chat_template`, a
    string. It is a program that comes with the checkpoint and
    runs in jinja2's sandbox. It is compiled when it is first used.
    A checkpoint without a template has our template for its config.json's `model_type` ("deepseek_v32" or
    "deepseek_v4"), if the tokenizer has the format's tokens.
    tokenizer.json's own padding and truncation are not applied: a prompt is encoded whole.
    Raises TokenizerError (a ValueError) that names the file that is missing or malformed.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        directory = checkpoint_directory(directory, weights=False)
        self._path, config_path = directory / "tokenizer.json", directory / "tokenizer_config.json"
        text = read_text(self._path, TokenizerError, _MAX_TOKENIZER)
        with _failures(f"{self._path}: not a tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = frozenset(token.content for token in added if token.special)

        config = read_json_object(config_path, TokenizerError, _MAX_CONFIG)
        named = {name: config[name] for name in _SPECIAL if config.get(name) is not None}
        self._special = {name: _token_text(config_path, name, value) for name, value in named.items()}
        self.bos_token_id = self._token_id("bos_token", config_path)
        self.eos_token_id = self._token_id("eos_token", config_path)

        tokens = {token.content for token in added}
        self._template_path, self._template = _find_template(directory, config, tokens)
        self.has_chat_template = self._template is not None

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included. The model may have more rows than that."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of `text`; special tokens that are spelled out in it become their ids.

        add_bos puts the beginning-of-sequence id in front if there is one and the text does not begin with it already.
        What tokenizer.json would itself add around a text is left out, so BOS never comes twice and EOS never at all.
        Raises TokenizerError if the tokenizer cannot encode it, TypeError for what is no text.
        """
        instance("text", text, str, "a string")
        with _failures(f"{self._path}: cannot encode a text of {len(text)} characters"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens and ids that are no token. Invalid UTF-8 becomes U+FFFD.

        Raises TokenizerError if the tokenizer cannot decode them, TypeError for what is no list.
        """
        if isinstance(ids, str | bytes) or not isinstance(ids, Sized):
            raise TypeError(f"ids: must be a list of token ids, got {shown(ids)}")
        with _failures(f"{self._path}: cannot decode {len(ids)} ids"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> "StreamDecoder":
        """A decoder for ids that come one by one."""
        return StreamDecoder(self.decode)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`, each {"role": ..., "content": ...}, by the checkpoint's chat template.

        add_generation_prompt ends it where the assistant's answer begins. The prompt begins with BOS, as text.
        tools: functions that the assistant may call, each {"type": "function", "function": {"name": ..., ...}}.
        variables: the template's variables. The templates of DeepSeek-V3.2 and V4 have `thinking` or
        `enable_thinking`, and `drop_thinking`; that of V4 `reasoning_effort` too (`chat_formats`).
        Raises TokenizerError if there is no template, if it refuses the messages or fails, and if it does not know a
        variable.
        """
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            raise TokenizerError(f"messages: must be a list, got {shown(messages)}")
        if self._template is None:
            raise TokenizerError(
                f"{self._template_path}: holds no chat_template, there is no chat_template.jinja, and no chat format "
                "is known for config.json's model_type with this tokenizer"
            )
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
        return render(self._template_path, self._template, {"documents": None, **self._special, **given}, variables)

    def _token_id(self, name: str, path: Path) -> int | None:
        text = self._special.get(name)
        if text is None:
            return None
        token_id = self._tokenizer.token_to_id(text)
        if token_id is None:
            raise TokenizerError(f"{path}: {name} {shown(text)} is no token of {self._path}")
        return token_id


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
        self._ids: list[int] = []  # the tokens of the previous piece, then tokens that have no text yet
        self._context = self._shown = 0  # numbers of tokens and characters of the previous piece


@contextmanager
def _failures(problem: str) -> Iterator[None]:
    """Turn the exceptions of the tokenizers library into TokenizerError. The library raises Exception itself; a panic
    of its Rust code is no subclass of Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{problem}: {error}") from error


def _token_text(path: Path, name: str, value: Any) -> str:
    """A special token's text, written as a string or as {"content": ...}."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise TokenizerError(
            f"{path}: {name} is {shown_json(value)}; accepted: a string, an object with 'content', or null"
        )
    return text


def _find_template(directory: Path, config: Mapping[str, Any], tokens: set[str]) -> tuple[Path, str | None]:
    """Return the file of the chat template, and the template, or None without one.

    config: the fields of tokenizer_config.json
    tokens: the tokenizer's added tokens
    """
    path = directory / "chat_template.jinja"
    if is_there(path):
        return path, read_text(path, TokenizerError, _MAX_TEMPLATE)
    path, template = directory / "tokenizer_config.json", config.get("chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise TokenizerError(f"{path}: chat_template is {shown_json(template)}; accepted: a string")
        return path, template
    model_config = directory / "config.json"
    if is_there(model_config) and tokens.issuperset(NEEDED):
        model_type = read_json_object(model_config, TokenizerError, _MAX_CONFIG).get("model_type")
        if isinstance(model_type, str) and model_type in FORMATS:
            return FORMATS[model_type], format_source(FORMATS[model_type])
    return path, None
