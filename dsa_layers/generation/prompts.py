"""Prompts as users give them, texts and lists of token ids, checked before any work."""

from collections.abc import Sequence
from typing import Any

from dsa_layers.arguments import integer, shown
from dsa_layers.io.tokenizer import Tokenizer


def encode_prompts(
    prompts: str | Sequence[str | Sequence[int]], tokenizer: Tokenizer | None, vocab_size: int
) -> list[list[int]]:
    """Return the token ids of each prompt: a text, which `tokenizer` encodes, or a list, an array or a tensor of ids. A
    text that is not in a list is one prompt.

    Raises TypeError or ValueError, which name the prompt and the token, for anything else, for empty prompts, ids
    outside [0, vocab_size), and texts that are not Unicode (lone surrogates).
    """
    listed = [prompts] if isinstance(prompts, str) else _listed(prompts)
    if listed is None:
        raise TypeError(f"prompts: must be a text, or a list of texts or of lists of token ids, got {shown(prompts)}")
    return [encode_prompt(f"prompts[{i}]", prompt, tokenizer, vocab_size) for i, prompt in enumerate(listed)]


def encode_prompt(name: str, prompt: str | Sequence[int], tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Return the token ids of one prompt. Raises as `encode_prompts` does, with this name."""
    if isinstance(prompt, str):
        ids = _encode(name, prompt, tokenizer) if prompt else []
    else:
        listed = _listed(prompt)
        if listed is None:
            raise TypeError(f"{name}: must be a text or a list of token ids, got {shown(prompt)}")
        ids = [t if type(t) is int else integer(f"{name}[{j}]", t) for j, t in enumerate(listed)]
    if outside := [t for t in ids if not 0 <= t < vocab_size]:
        raise ValueError(f"{name}: token {shown(outside[0])} is outside the model's vocabulary of {vocab_size}")
    if not ids:
        raise ValueError(f"{name}: is empty; a prompt needs at least one token")
    return ids


def _encode(name: str, text: str, tokenizer: Tokenizer | None) -> list[int]:
    if tokenizer is None:
        raise ValueError(f"{name}: must be token ids for a generator without a tokenizer, got a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: is not Unicode text: character {error.start} is the surrogate "
            f"U+{ord(text[error.start]):04X}, as bytes that are not UTF-8 leave it"
        ) from None
    return tokenizer.encode(text)


def _listed(value: Any) -> list[Any] | None:
    """Return the items of a sequence, an array or a tensor; None for anything else."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray) else None
