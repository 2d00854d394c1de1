"""Needles in a text, for every indexer of the shipped model, and what it selects of them beside float64.

A needle is a file's beginning: the token that begins a file, and `def NAME(self) -> int:` of a name that the text has
once. The text ends on an indented `def NAME` of each. From the line break there the first layer can look for the tokens
that begin a file, and later layers, at each token of a name, for what came behind it.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import nn

import dsa
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.command.parser import HELD_OUT_TEXT
from dsa_layers.families.sparse_mla.model import SparseMLAForCausalLM
from dsa_layers.io.tokenizer import Tokenizer
from dsa_layers.layers.indexer import LightningIndexer

NEEDLES = 6
WORDS = """velocity zebra quux waldo garply zircon buffer pelican walrus marble copper lantern meadow orchid puffin
quartz ribbon saffron thistle umbra violet willow yonder zephyr anchor bramble cinder""".split()


class Planted(NamedTuple):
    """tokens [T]; pairs (query's position, its needle's): of all line breaks at the end with the first tokens of all
    files, from the text's first query on, and of each token of the names there with what is behind it in the needle."""

    tokens: torch.Tensor
    files: list[tuple[int, int]]
    names: list[tuple[int, int]]


class Selected(NamedTuple):
    """Of the last queries, bool [queries, T]: the keys that a layer selected; those that float64 selects of the same
    quantised queries and keys; and those that it selects of what the indexer was given, without FP8."""

    own: torch.Tensor
    same: torch.Tensor
    exact: torch.Tensor

    def found(self, pairs: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
        """The share of needles that the layer selected, of those that float64 does, and of those that both do."""
        query, key = torch.tensor(pairs).T
        own, exact = (selected[query - self.own.shape[1], key] for selected in (self.own, self.exact))
        return tuple(float(selected.float().mean()) for selected in (own, exact, own & exact))

    def equal(self) -> tuple[float, float]:
        """The share of selected keys that float64 selects, too: of the same bytes, and without FP8."""
        return tuple(float((self.own & other).sum() / self.own.sum()) for other in (self.same, self.exact))


class Pass(NamedTuple):
    """What an indexer's `select` was called with, and what it gave. rest: cos, sin and the batch."""

    indexer: LightningIndexer
    x: torch.Tensor
    qr: torch.Tensor
    rest: tuple
    indices: torch.Tensor


def planted_text(tokenizer: Tokenizer, length: int, seed: int, clear: int) -> Planted:
    """A part of a held-out text with needles at equal distances, from its first token to `clear` before the queries."""
    order = torch.randperm(len(WORDS), generator=torch.Generator().manual_seed(seed)).tolist()
    names = ["_".join(WORDS[i] for i in order[first : first + 3]) for first in range(0, 3 * NEEDLES, 3)]
    hay = tokenizer.encode(HELD_OUT_TEXT.read_text(encoding="utf-8"), add_bos=False)
    needles = [tokenizer.encode(f"def {name}(self) -> int:\n\n") for name in names]  # each begins a file
    asked = [tokenizer.encode(f"\n    def {name}", add_bos=False) for name in names]
    room = length - sum(map(len, needles + asked))
    part = hay[seed * 1024 :][:room]
    tokens, places, used = [], [], 0
    for i, needle in enumerate(needles):
        upto = i * (room - clear) // (NEEDLES - 1)
        tokens += part[used:upto]
        places.append(len(tokens))
        tokens += needle
        used = upto
    tokens += part[used:]
    files, behind = [], []
    for own, at in zip(asked, places):
        start = len(tokens)
        tokens += own
        files += [(start, place) for place in places]
        # The line break and `def` are a token each, as is what begins a file.
        behind += [(start + i, at + i + 1) for i in range(2, len(own))]
    return Planted(torch.tensor(tokens), files, behind)


def passes(model: SparseMLAForCausalLM, tokens: torch.Tensor) -> list[Pass]:
    """Of the model's indexers and its drafter's."""
    batch, calls, select = SequenceBatch.without_cache([len(tokens)]), [], LightningIndexer.select

    @functools.wraps(select)
    def recorded(indexer, x, qr, *rest, **options):
        calls.append(Pass(indexer, x, qr, rest[:3], select(indexer, x, qr, *rest, **options)))
        return calls[-1].indices

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(LightningIndexer, "select", recorded)
        states = model.states(tokens, batch)
        following = torch.cat((tokens[1:], model.logits(states[-1:]).argmax(-1)))
        model.drafter(following, states, batch)
    return calls


def selected(given: Pass, plain: LightningIndexer, queries: int) -> Selected:
    """Of the last so many queries, selected again. plain: the indexer with weights that are not quantised."""
    scores = []

    def recorded(q, keys, weights, *ranges, **options):
        k, scale = keys[0].double(), keys[1].double()
        scores.append(_scores(q[-queries:].double(), k * scale[:, None], weights[-queries:].double()))
        return op(q, keys, weights, *ranges, **options)

    op = dsa.fp8_mqa_logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsa, "fp8_mqa_logits", recorded)
        indices = given.indexer.select(given.x, given.qr, *given.rest)[-queries:]
    (same,), top_k = scores, given.indexer.top_k
    return Selected(
        mask(indices, len(given.x)), _best(same, top_k), _best(_exact_scores(plain, given.x, given.qr, queries), top_k)
    )


def indexers(model: SparseMLAForCausalLM) -> list[LightningIndexer]:
    """Of every layer, and of the drafter."""
    blocks = [*model.model.layers, model.drafter.block]
    return [block.self_attn.indexer for block in blocks]


def _exact_scores(indexer: LightningIndexer, x: torch.Tensor, qr: torch.Tensor, queries: int) -> torch.Tensor:
    """I [queries, T] in float64 by the formula of `LightningIndexer`, of one sequence."""
    norm, heads, dim = indexer.k_norm, indexer.n_heads, indexer.head_dim
    x, last, position = x.double(), slice(len(x) - queries, None), torch.arange(len(x))
    q = (qr[last].double() @ indexer.wq_b.weight.double().T).unflatten(-1, (heads, dim))
    k = nn.functional.layer_norm(
        x @ indexer.wk.weight.double().T, (dim,), norm.weight.double(), norm.bias.double(), norm.eps
    )
    weights = x[last] @ indexer.weights_proj.weight.double().T * heads**-0.5 * dim**-0.5
    return _scores(_turned(q, position[last, None]), _turned(k, position), weights)


def _turned(v: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Rope on the first 64 dimensions, of pairs 32 apart."""
    angle = position.double()[..., None] * 1e4 ** (-torch.arange(32).double() / 32)
    a, b, rest = v.split((32, 32, v.shape[-1] - 64), -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest), -1)


def _scores(q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.einsum("th,ths->ts", weights, torch.einsum("thd,sd->ths", q, k).relu())


def _best(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """bool, as scores [queries, T]: the top_k largest that each of the last queries sees."""
    queries, length = scores.shape
    visible = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    return mask(scores.masked_fill(~visible, -torch.inf).topk(top_k).indices, length)


def mask(indices: torch.Tensor, length: int) -> torch.Tensor:
    """bool [queries, length] of indices [queries, top_k], none of which are -1."""
    return torch.zeros(len(indices), length, dtype=torch.bool).scatter_(1, indices.long(), True)
