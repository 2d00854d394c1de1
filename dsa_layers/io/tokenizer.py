"""Convert text to token ids and back, and apply chat templates, with a checkpoint's tokenizer files."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import tokenizers

from dsa.runtime.checks import check_instance, shown, shown_json
from dsa_layers.errors import TokenizerError
from dsa_layers.io.chat_template import FORMATS, NEEDED, format_source, render
from dsa_layers.io.directory import checkpoint_directory
from dsa_layers.untrusted_files import read_json_object, read_text

# Maximum file sizes in bytes.
_MAX_TOKENIZER = 2**26
_MAX_CONFIG = 2**23
_MAX_TEMPLATE = 2**20

_REPLACEMENT = "\ufffd"  # a decoder returns it for the bytes of an incomplete character
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class Tokenizer:
    """The tokenizer of a checkpoint's directory or hub id. It reads tokenizer.json, and the special tokens from
    tokenizer_config.json.

    bos_token_id, eos_token_id: the ids of these tokens; None if tokenizer_config.json does not name the token.
    special_tokens: the texts of the tokens that `decode` omits.
    has_chat_template: whether `apply_chat_template` has a template.
    The chat template is the file chat_template.jinja if it exists, else the string `chat_template` in
    tokenizer_config.json. The template runs in jinja2's sandbox, because it is a program from the checkpoint.
    For a checkpoint without a template, dsa's template for the `model_type` in config.json ("deepseek_v32" or
    "deepseek_v4") is used if the tokenizer's added tokens include those in `NEEDED` (io/chat_template.py).
    Padding and truncation in tokenizer.json are disabled.
    Raises TokenizerError (a ValueError), which names the file, if a file is missing or malformed.
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
        named = (name for name in _SPECIAL if config.get(name) is not None)
        self._special = {name: _token_text(config_path, name, config[name]) for name in named}
        self.bos_token_id = self._token_id("bos_token", config_path)
        self.eos_token_id = self._token_id("eos_token", config_path)

        tokens = {token.content for token in added}
        self._template_path, self._template = _find_template(directory, config, tokens)
        self.has_chat_template = self._template is not None

    @property
    def vocab_size(self) -> int:
        """The number of tokens, including special tokens. The model's embedding may have more rows."""
        return self._tokenizer.get_vocab_size()

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Return the token ids of `text`. Special tokens that the text spells out are encoded as their ids.

        add_bos: whether to insert the BOS id at the start, if the tokenizer has one and the ids do not begin with it
        Special tokens of the post-processor in tokenizer.json are not added, so EOS is never added.
        Raises TokenizerError if the tokenizer cannot encode the text, and TypeError if `text` is not a string.
        """
        check_instance("text", text, str, "a string")
        with _failures(f"{self._path}: cannot encode a text of {len(text)} characters"):
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if add_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Special tokens and unknown ids are omitted. Invalid UTF-8 becomes U+FFFD.

        Raises TokenizerError if the tokenizer cannot decode the ids, and TypeError if `ids` is a string, bytes or not a
        sequence.
        """
        if isinstance(ids, str | bytes) or not isinstance(ids, Sized):
            raise TypeError(f"ids: must be a list of token ids, got {shown(ids)}")
        with _failures(f"{self._path}: cannot decode {len(ids)} ids"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> "StreamDecoder":
        """Return a decoder that takes one id at a time."""
        return StreamDecoder(self.decode)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render `messages`, each {"role": ..., "content": ...}, with the chat template, and return the prompt as text.
        If the prompt begins with BOS, `encode` adds no second BOS.

        add_generation_prompt: whether to end the prompt with the tokens that begin an answer of the assistant.
        tools: functions that the assistant may call, each {"type": "function", "function": {"name": ..., ...}}.
        variables: further variables of the template. dsa's templates for DeepSeek-V3.2 and V4 have `thinking`,
        `enable_thinking` and `drop_thinking`, and for V4 also `reasoning_effort`; the files in
        dsa_layers/io/chat_formats describe them.
        Raises TokenizerError if there is no template, if the template refuses the messages or fails, or if one of
        `variables` is never read by the template.
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
    """A decoder that takes one id at a time. The pieces of text that `push` and `flush` return, concatenated, are the
    text of all ids.

    A character can span several tokens, so the decoder holds back text that ends in U+FFFD. It decodes the previous
    piece's tokens again together with the new tokens, because some tokenizers strip the leading space of a text's first
    token. `tokenizers.decoders.DecodeStream` is not used: it raises exceptions for some ids whose bytes are not UTF-8.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """decode: a function from ids to text, such as `Tokenizer.decode`"""
        self._decode = decode
        self._ids: list[int] = []  # the tokens of the previous piece, then the tokens whose text is held back
        self._context = self._shown = 0  # numbers of tokens and characters of the previous piece

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, or "" for a special token and for a character that is not yet
        complete."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) or len(text) <= self._shown:
            return ""
        piece = text[self._shown :]
        self._ids = self._ids[self._context :]
        self._context, self._shown = len(self._ids), len(self._decode(self._ids))
        return piece

    def flush(self) -> str:
        """Return the text that is held back. Call `flush` after the last id."""
        return self._decode(self._ids)[self._shown :]


@contextmanager
def _failures(problem: str) -> Iterator[None]:
    """Convert exceptions of the tokenizers library to TokenizerError. A panic of its Rust code raises PanicException,
    which does not derive from Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{problem}: {error}") from error


def _token_text(path: Path, name: str, value: Any) -> str:
    """Return the text of the special token `name`. value: the field `name` of the file `path`, a string or
    {"content": string}."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise TokenizerError(
            f"{path}: {name} is {shown_json(value)}; accepted: a string, an object with 'content', or null"
        )
    return text


def _find_template(directory: Path, config: Mapping[str, Any], tokens: set[str]) -> tuple[Path, str | None]:
    """Return the path and the text of the chat template. Without a template, return the path of tokenizer_config.json
    and None.

    config: the fields of tokenizer_config.json
    tokens: the tokenizer's added tokens
    """
    path = directory / "chat_template.jinja"
    if path.exists():
        return path, read_text(path, TokenizerError, _MAX_TEMPLATE)
    path, template = directory / "tokenizer_config.json", config.get("chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise TokenizerError(f"{path}: chat_template is {shown_json(template)}; accepted: a string")
        return path, template
    model_config = directory / "config.json"
    if model_config.exists() and tokens.issuperset(NEEDED):
        model_type = read_json_object(model_config, TokenizerError, _MAX_CONFIG).get("model_type")
        if isinstance(model_type, str) and model_type in FORMATS:
            return FORMATS[model_type], format_source(FORMATS[model_type])
    return path, None
