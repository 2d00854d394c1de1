"""The tokens: bytes, a token that comes before a file and ends one, and pairs of tokens that are frequent in the text.

Within 4 MB a vocabulary of 512 does better than bytes alone: see docs/how-to/train-an-indexer.md.
"""

import json
from collections.abc import Sequence

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

# Ids below are bytes.
BEGIN = 256
BYTES = BEGIN + 1  # tokens of a vocabulary without pairs
_BOS = "<｜begin▁of▁file｜>"

# A line's end with the indentation behind it, words, digits one by one, and signs, each with the blank in front.
_PARTS = r"[ \t]*(?:\r?\n[ \t]*)+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+"
_LEARNT_FROM = 32_000_000  # characters of the text


def train_tokenizer(texts: Sequence[str], vocab: int) -> tokenizers.Tokenizer:
    """Byte-pair encoding with `vocab` tokens, or fewer if the text has no more pairs: BYTES are bytes alone. ValueError
    for fewer than these."""
    if vocab < BYTES:
        raise ValueError(f"vocab: must be at least {BYTES}, the bytes and the token that begins a file, got {vocab}")
    merges: list[tuple[str, str]] = []
    if vocab > BYTES:
        learner = _tokenizer(models.BPE())
        every = max(1, sum(map(len, texts)) // _LEARNT_FROM)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        learner.train_from_iterator(texts[::every], trainer)
        merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    ids = {_letter(b): b for b in range(256)} | {_BOS: BEGIN}
    for pair in merges:
        ids.setdefault("".join(pair), len(ids))
    tokenizer = _tokenizer(models.BPE(ids, merges))
    tokenizer.add_special_tokens([_BOS])
    return tokenizer


def bytes_of_tokens(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Of each token, how many bytes it stands for: BEGIN for none."""
    texts = (tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size()))
    return [0 if text == _BOS else len(text) for text in texts]


def tokenizer_config(max_length: int) -> dict[str, object]:
    """The fields of tokenizer_config.json."""
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": _BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": _BOS,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _tokenizer(model: models.Model) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_PARTS), "isolated"), as_letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _letter(byte: int) -> str:
    """The letter that byte-level tokenizers write for a byte: itself if it is printable, else one past 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + sum(1 for b in range(byte) if b not in printable))
