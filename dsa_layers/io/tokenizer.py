"""Text to token ids and back, with the tokenizer and the chat template of a checkpoint."""

from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers

from dsa_layers.arguments import instance, shown, shown_json
from dsa_layers.errors import TokenizerError
from dsa_layers.io.chat_formats import FORMATS, NEEDED, ChatFormat
from dsa_layers.io.chat_template import render
from dsa_layers.io.hub import checkpoint_directory
from dsa_layers.io.stream_decoder import StreamDecoder
from dsa_layers.untrusted_files import is_there, read_json_object, read_text

# Bytes. The largest published tokenizer.json has 35 MB.
_MAX_TOKENIZER = 2**26
_MAX_CONFIG = 2**23
_MAX_TEMPLATE = 2**20

_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Tokenizer:
    """The tokenizer of a checkpoint's directory or hub id: tokenizer.json, and tokenizer_config.json for its special
    tokens.

    bos_token_id, eos_token_id: None if tokenizer_config.json names no such token.
    special_tokens: the texts of the tokens that `decode` leaves out.
    The chat template is chat_template.jinja if there is one, else tokenizer_config.json's `chat_template`: a string, or
    a list of {"name", "template"} of which "default" is taken. It is a program that comes with the checkpoint and
    runs in jinja2's sandbox. It is compiled when it is first used.
    A checkpoint without a template has the chat format of its config.json's `model_type`, if `chat_formats.FORMATS`
    has one and the tokenizer has the format's tokens.
    tokenizer.json's own padding and truncation are not applied: a prompt is encoded whole.
    Raises TokenizerError (a ValueError) that names the file that is missing or malformed.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        directory = checkpoint_directory(directory, weights=False)
        self._path, config_path = directory / "tokenizer.json", directory / "tokenizer_config.json"
        with _failures(f"{self._path}: not a tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_str(read_text(self._path, TokenizerError, _MAX_TOKENIZER))
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            added = self._tokenizer.get_added_tokens_decoder().values()
        self._added = frozenset(token.content for token in added)
        self.special_tokens = frozenset(token.content for token in added if token.special)

        with _failures(f"{config_path}: not a tokenizer's configuration"):
            config = read_json_object(config_path, TokenizerError, _MAX_CONFIG)
        named = {name: config[name] for name in _SPECIAL if config.get(name) is not None}
        self._special = {name: _token_text(config_path, name, value) for name, value in named.items()}
        self.bos_token_id = self._token_id("bos_token", config_path)
        self.eos_token_id = self._token_id("eos_token", config_path)

        self._model_config_path, self._template_path = directory / "config.json", directory / "chat_template.jinja"
        if is_there(self._template_path):
            self._template = read_text(self._template_path, TokenizerError, _MAX_TEMPLATE)
        else:
            self._template, self._template_path = _chat_template(config_path, config), config_path

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included. The model may have more rows than that."""
        return self._tokenizer.get_vocab_size()

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` has a template or a format. Raises TokenizerError for a config.json that cannot
        be read."""
        return self._template is not None or self._format is not None

    @cached_property
    def _format(self) -> ChatFormat | None:
        if not is_there(self._model_config_path):
            return None
        model_type = read_json_object(self._model_config_path, TokenizerError, _MAX_CONFIG).get("model_type")
        return FORMATS.get(model_type) if isinstance(model_type, str) and self._added.issuperset(NEEDED) else None

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

    def stream(self) -> StreamDecoder:
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
        """The prompt for `messages`, each {"role": ..., "content": ...}, by the checkpoint's chat template or format.

        add_generation_prompt ends it where the assistant's answer begins. The prompt begins with BOS, as text.
        tools: functions that the assistant may call, each {"type": "function", "function": {"name": ..., ...}}.
        variables: the template's variables. A format takes options: for DeepSeek-V3.2 and V4 `thinking` or
        `enable_thinking`, and `drop_thinking`; for V4 `reasoning_effort` too (`chat_formats`).
        Raises TokenizerError if there is neither template nor format, if it refuses the messages or fails, and if it
        does not know a variable.
        """
        if self._template is not None:
            given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
            return render(self._template_path, self._template, {"documents": None, **self._special, **given}, variables)
        if self._format is None:
            raise TokenizerError(
                f"{self._template_path}: holds no chat_template, there is no chat_template.jinja, and no chat format "
                "is known for config.json's model_type with this tokenizer"
            )
        return self._format(messages, tools, variables, add_generation_prompt=add_generation_prompt)

    def _token_id(self, name: str, path: Path) -> int | None:
        text = self._special.get(name)
        if text is None:
            return None
        with _failures(f"{path}: {name} {shown(text)} cannot be looked up"):
            token_id = self._tokenizer.token_to_id(text)
        if token_id is None:
            raise TokenizerError(f"{path}: {name} {shown(text)} is no token of {self._path}")
        return token_id


@contextmanager
def _failures(problem: str) -> Iterator[None]:
    """Turn the exceptions of the tokenizers library, and a missing file, into TokenizerError. The library raises
    Exception itself; a panic of its Rust code is no subclass of Exception."""
    try:
        yield
    except TokenizerError:
        raise
    except FileNotFoundError as error:
        needs = "a checkpoint needs it to turn text into tokens"
        raise TokenizerError(f"{error.filename}: no such file; {needs}") from None
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


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    """The template in tokenizer_config.json. Of a list of named ones the last "default" counts."""
    template = config.get("chat_template")
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        default = [entry.get("template") for entry in entries if entry.get("name") == "default"]
        template = default[-1] if default else template
    if template is not None and not isinstance(template, str):
        raise TokenizerError(
            f"{path}: chat_template is {shown_json(template)}; accepted: a string or a list of named strings, one of "
            "them 'default'"
        )
    return template
