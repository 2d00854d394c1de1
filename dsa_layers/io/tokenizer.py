"""Text to token ids and back, with the tokenizer and the chat template that a checkpoint carries."""

import json
import math
import os
import warnings
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
from dsa_layers.io.chat_template import ChatTemplate, ChatTemplateError, UnknownVariable
from dsa_layers.io.hub import checkpoint_directory
from dsa_layers.io.stream_decoder import StreamDecoder
from dsa_layers.io.tokenizer_failures import tokenizer_failures
from dsa_layers.untrusted_files import check_values, read_json_object, read_text

# Bytes. The largest published tokenizers have 35 MB, and two million values.
_MAX_TOKENIZER = 2**26
_MAX_TOKENIZER_VALUES = 3_000_000
_MAX_CONFIG = 2**23
_MAX_TEMPLATE = 2**20

# The special tokens that tokenizer_config.json names, and its flags whose names end likewise.
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_FLAGS = ("add_bos_token", "add_eos_token")

# Characters that the replacements of a normalizer or decoder make of one, at most. Those in use keep the length.
_MAX_GROWTH = 2**8


class Tokenizer:
    """The tokenizer of a checkpoint's directory or hub id: tokenizer.json, and tokenizer_config.json for its special
    tokens.

    bos_token_id, eos_token_id: None if tokenizer_config.json names no such token.
    special_tokens: the texts of the tokens that `decode` leaves out.
    The chat template is chat_template.jinja if there is one, else tokenizer_config.json's `chat_template`: a string, or
    a list of {"name", "template"} of which "default" is taken. It is a program that comes with the checkpoint and
    runs in jinja2's sandbox (`ChatTemplate`). It is compiled when it is first used.
    Without a template a checkpoint whose config.json has a `model_type` of `chat_formats.FORMATS` has that format,
    unless the tokenizer's vocabulary lacks the format's tokens.
    tokenizer.json's own padding and truncation are not applied: a prompt is encoded whole.
    Raises TokenizerError (a ValueError) that names the file that is missing or malformed.
    """

    def __init__(self, directory: str | PathLike[str]) -> None:
        directory = checkpoint_directory(directory, weights=False)
        tokenizer_path, config_path = directory / "tokenizer.json", directory / "tokenizer_config.json"
        self._tokenizer_path = tokenizer_path
        with _missing(tokenizer_path):
            content = read_text(tokenizer_path, TokenizerError, _MAX_TOKENIZER)
        check_values(tokenizer_path, content, TokenizerError, _MAX_TOKENIZER_VALUES)
        with tokenizer_failures(f"{tokenizer_path}: not a tokenizer"):
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
        for part in ("normalizer", "decoder"):
            with tokenizer_failures(f"{tokenizer_path}: not a tokenizer"):
                step = getattr(self._tokenizer, part)
                growth = 1 if step is None else _growth(json.loads(step.__getstate__()))
            if growth > _MAX_GROWTH:
                raise TokenizerError(
                    f"{tokenizer_path}: its {part} can make a text {growth:g} times as long; accepted: at most "
                    f"{_MAX_GROWTH}"
                )
        with _missing(config_path):
            config = read_json_object(config_path, TokenizerError, _MAX_CONFIG)

        for name in _FLAGS:
            if not isinstance(config.get(name), bool | None):
                raise TokenizerError(
                    f"{config_path}: {name} is {shown_json(config[name])}; accepted: true, false or null"
                )
        named = {name: config[name] for name in _SPECIAL if config.get(name) is not None}
        self._special = {name: _token_text(config_path, name, value) for name, value in named.items()}
        self.bos_token_id = self._token_id("bos_token", config_path)
        self.eos_token_id = self._token_id("eos_token", config_path)
        template_path = directory / "chat_template.jinja"
        if os.path.lexists(template_path):  # a link to nothing is a file that was not fetched
            with _missing(template_path):
                template = read_text(template_path, TokenizerError, _MAX_TEMPLATE)
            self._template_path = template_path
        else:
            template, self._template_path = _chat_template(config_path, config), config_path
        self._template = None if template is None else ChatTemplate(template)
        self._config_path = directory / "config.json"
        with tokenizer_failures(f"{tokenizer_path}: not a tokenizer"):
            added = self._tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._skipped = {token_id for token_id, token in added.items() if token.special}
        self.special_tokens = frozenset(token.content for token in added.values() if token.special)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included. The model may have more rows than that."""
        return self._tokenizer.get_vocab_size()

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` has a template or a format. Raises TokenizerError for a config.json that cannot
        be read, and for a tokenizer that spells the format's tokens out."""
        return self._template is not None or self._format is not None

    @cached_property
    def _format(self) -> ChatFormat | None:
        try:
            model_type = read_json_object(self._config_path, TokenizerError, _MAX_CONFIG).get("model_type")
        except FileNotFoundError:
            return None
        found = FORMATS.get(model_type) if isinstance(model_type, str) else None
        if found is None or any(self._tokenizer.token_to_id(token) is None for token in NEEDED):
            return None
        for token in NEEDED:
            if len(self._encoding(token).ids) != 1:  # it is in the vocabulary, but not among the added tokens
                raise TokenizerError(
                    f"{self._tokenizer_path}: has no token {token}, which the chat format of {model_type} needs"
                )
        return found

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of `text`; special tokens that are spelled out in it become their ids.

        add_bos puts the beginning-of-sequence id in front if there is one and the text does not begin with it already.
        What tokenizer.json would itself add around a text is left out, so BOS never comes twice and EOS never at all.
        Warns of characters that no token stands for: the ids leave them out.
        Raises TokenizerError if the tokenizer cannot encode it, TypeError for what is no text.
        """
        instance("text", text, str, "a string")
        encoding = self._encoding(text)
        ids = encoding.ids
        if lost := self._left_out(text, encoding):
            warnings.warn(f"{self._tokenizer_path}: has no token for {shown(lost)}: left out", stacklevel=2)
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def _encoding(self, text: str) -> tokenizers.Encoding:
        with tokenizer_failures(f"{self._tokenizer_path}: cannot encode a text of {len(text)} characters"):
            return self._tokenizer.encode(text, add_special_tokens=False)

    def _left_out(self, text: str, encoding: tokenizers.Encoding) -> str:
        """The characters of `text` that no token stands for, each once."""
        if not _leaves_out(text, encoding.offsets):
            return ""
        # Which characters the gaps hold is known between added tokens: a BPE model shifts the offsets after a gap.
        rest, end = [], 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets):
            if token_id in self._added:
                rest.append(text[end:start])
                end = stop
        rest.append(text[end:])
        return "".join(c for c in dict.fromkeys("".join(rest)) if not c.isspace() and not self._encoding(c).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens and ids that are no token. Invalid UTF-8 becomes U+FFFD.

        Raises TokenizerError if the tokenizer cannot decode them, TypeError for what is no list.
        """
        if isinstance(ids, str | bytes) or not isinstance(ids, Sized):
            raise TypeError(f"ids: must be a list of token ids, got {shown(ids)}")
        with tokenizer_failures(f"{self._tokenizer_path}: cannot decode {len(ids)} ids"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> StreamDecoder:
        """A decoder for ids that come one by one."""
        return StreamDecoder(self._tokenizer_path, self._token_text, self._tokenizer.decoder)

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
        variables: those of the template. Of a format they are options: for DeepSeek-V3.2 and V4 `thinking` or
        `enable_thinking`, and `drop_thinking`; for V4 `reasoning_effort` too (`chat_formats`).
        Raises TokenizerError if there is neither template nor format, if it refuses the messages, if it does not
        know a variable, if a template writes too much, or if it writes nothing.
        """
        if self._template is None and self._format is None:
            raise TokenizerError(
                f"{self._template_path}: holds no chat_template, there is no chat_template.jinja, and no chat format "
                "is known for config.json's model_type with this tokenizer"
            )
        if self._template is None:
            return self._format(messages, tools, variables, add_generation_prompt=add_generation_prompt)
        given = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
        with self._template_failures():
            prompt = self._template.render({"documents": None, **self._special, **variables, **given}, [*variables])
            if not prompt:
                raise ChatTemplateError("writes no text for these messages")
        return prompt

    def _token_text(self, token_id: int) -> str | None:
        """The token as tokenizer.json has it; None for one that `decode` leaves out."""
        return None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)

    def _token_id(self, name: str, path: Path) -> int | None:
        text = self._special.get(name)
        if text is None:
            return None
        with tokenizer_failures(f"{path}: {name} {shown(text)} cannot be looked up"):
            token_id = self._tokenizer.token_to_id(text)
        if token_id is None:
            raise TokenizerError(f"{path}: {name} {shown(text)} is no token of {self._tokenizer_path}")
        return token_id

    @contextmanager
    def _template_failures(self) -> Iterator[None]:
        try:
            yield
        except UnknownVariable as error:
            given = {*self._special, "messages", "add_generation_prompt", "tools", "documents"}
            accepted = ", ".join(sorted({*error.known} - given)) or "none"
            raise TokenizerError(f"{error.name}: is no variable of the chat template; accepted: {accepted}") from None
        except ChatTemplateError as error:
            raise TokenizerError(f"{self._template_path}: chat template: {error}") from error


@contextmanager
def _missing(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise TokenizerError(f"{path}: no such file; a checkpoint needs it to turn text into tokens") from None


def _growth(step: Any) -> float:
    """How many times as long a text can be after a normalizer or decoder: replacements one after the other multiply,
    until a letter fills the memory. A float, which thousands of them make infinite."""
    if isinstance(step, list):
        return math.prod(map(_growth, step), start=1.0)
    if not isinstance(step, dict):
        return 1.0
    added = {"Replace": step.get("content"), "Prepend": step.get("prepend")}.get(step.get("type"))
    own = len(added) + (step["type"] == "Prepend") if isinstance(added, str) else 1
    return max(own, 1) * math.prod(map(_growth, step.values()), start=1.0)


def _leaves_out(text: str, offsets: Sequence[tuple[int, int]]) -> bool:
    """Whether tokens at `offsets` leave out more than white space."""
    end = 0
    for start, stop in offsets:
        if text[end:start].strip():
            return True
        end = max(end, stop)
    return bool(text[end:].strip())


def _token_text(path: Path, name: str, value: Any) -> str:
    """A special token's text, written as a string or as {"content": ...}."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise TokenizerError(
            f"{path}: {name} is {shown_json(value)}; accepted: a string, an object with 'content', or null"
        )
    return text


def _chat_template(path: Path, config: Mapping[str, Any]) -> str | None:
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        default = [entry.get("template") for entry in named if entry.get("name") == "default"]
        if not default:
            names = shown_json([entry.get("name") for entry in named])
            raise TokenizerError(f"{path}: chat_template names {names}; accepted: a list with 'default'")
        template = default[-1]
    if template is not None and not isinstance(template, str):
        raise TokenizerError(
            f"{path}: chat_template is {shown_json(template)}; accepted: a string or a list of named strings"
        )
    return template
