"""The text as tokens, and sequences of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import tokenizers
import torch

from .text import Text
from .vocabulary import BEGIN, bytes_of_tokens

_TOGETHER = 1024  # files that are encoded at a time


@dataclass(frozen=True)
class Corpus:
    """train, held_out: int32 tokens [N], every file behind a BEGIN, the latter by "library" and "packages"; bytes_of:
    int64 [vocabulary], how many bytes each token stands for."""

    train: torch.Tensor
    held_out: dict[str, torch.Tensor]
    bytes_of: torch.Tensor

    @classmethod
    def of(cls, text: Text, tokenizer: tokenizers.Tokenizer) -> "Corpus":
        held_out = {name: _tokens(files, tokenizer) for name, files in text.held_out.items()}
        return cls(_tokens(text.train, tokenizer), held_out, torch.tensor(bytes_of_tokens(tokenizer)))

    def first_pieces(self, name: str, length: int, most_bytes: int) -> torch.Tensor:
        """`pieces` of the first `most_bytes` of a held-out text, and at least one of them if the text has one."""
        tokens = self.held_out[name]
        ends = self.bytes_of[tokens.long()].cumsum(0)
        return pieces(tokens[: max(length, int((ends <= most_bytes).sum()))], length)

    def bytes_in(self, sequences: torch.Tensor) -> int:
        """That the tokens behind the first of each of `sequences` [N, 1 + L] stand for."""
        return int(self.bytes_of[sequences[:, 1:].cpu()].sum())


def draw(tokens: torch.Tensor, count: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """int64 [count, 1 + length]: random pieces of the text, each behind a BEGIN, wherever they lie."""
    begin = torch.randint(len(tokens) - length + 1, (count, 1), generator=generator, device=tokens.device)
    return _behind_begin(tokens[begin + torch.arange(length, device=tokens.device)])


def pieces(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """int64 [N // length, 1 + length]: the whole text, but for its end, in pieces that do not overlap."""
    return _behind_begin(tokens[: len(tokens) // length * length].view(-1, length))


def spread(sequences: torch.Tensor, count: int) -> torch.Tensor:
    """At most `count` of the sequences, from everywhere among them."""
    return sequences[:: -(-len(sequences) // count)] if len(sequences) > count else sequences


def _behind_begin(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x.long(), (1, 0), value=BEGIN)


def _tokens(texts: Sequence[str], tokenizer: tokenizers.Tokenizer) -> torch.Tensor:
    parts = [torch.empty(0, dtype=torch.int32)]
    for i in range(0, len(texts), _TOGETHER):
        for encoded in tokenizer.encode_batch(texts[i : i + _TOGETHER], add_special_tokens=False):
            parts.append(torch.tensor([BEGIN, *encoded.ids], dtype=torch.int32))
    return torch.cat(parts)
