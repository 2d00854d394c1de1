"""The loss of a model on text, and how much the predictions of two computations differ.

Predictions are computed as generation computes them: in chunks over a paged cache.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn.functional import cross_entropy, kl_div

from dsa_layers.arguments import integer
from dsa_layers.batch.prefill import Chunk, prefill_batch
from dsa_layers.models.protocols import Model


@dataclass(frozen=True)
class HeldOutLoss:
    """loss: mean over the predicted tokens, in nats. seconds: of all passes."""

    loss: float
    tokens: int
    seconds: float


@torch.inference_mode()
def held_out_loss(model: Model, sequences: Sequence[Sequence[int]], *, chunk: int = 2048) -> HeldOutLoss:
    """Return the loss of predicting each token of the sequences, except the first, from the tokens before it.

    chunk: the most tokens of a pass, at least 1.

    Raises ValueError for sequences of fewer than two tokens, and for none, and TypeError or ValueError for another
    chunk.
    """
    chunk = integer("chunk", chunk, at_least=1)
    if not sequences or min(map(len, sequences)) < 2:
        raise ValueError(f"sequences: must be lists of at least 2 tokens, got lengths {list(map(len, sequences))}")
    began = time.perf_counter()
    losses = [
        cross_entropy(logits, targets, reduction="sum") for logits, targets in predictions(model, sequences, chunk)
    ]
    predicted = sum(len(tokens) - 1 for tokens in sequences)
    loss = torch.stack(losses).double().sum().item() / predicted
    return HeldOutLoss(loss, predicted, time.perf_counter() - began)


@torch.inference_mode()
def predictions(
    model: Model, sequences: Sequence[Sequence[int]], chunk: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the logits [T, vocab_size] and the targets [T] of each pass: all tokens of a sequence except the last, in
    parts of at most `chunk` tokens, sequence by sequence."""
    device, page_size = next(model.parameters()).device, model.page_size
    pages = range(-(-max(map(len, sequences)) // page_size))
    cache = model.make_cache(len(pages), page_size, device, state_slots=1)
    for tokens in sequences:
        text = torch.tensor(tokens, device=device)
        # Parts of equal length: a part of one token, which would be a decoding pass, needs a chunk of 1 or 2.
        parts = -(-(len(tokens) - 1) // chunk)
        done = 0
        for inputs, targets in zip(text[:-1].tensor_split(parts), text[1:].tensor_split(parts)):
            batch = prefill_batch([Chunk(len(inputs), done, pages, 0)], page_size, device)
            done += len(inputs)
            yield model(inputs, batch, cache, all_tokens=True), targets


@dataclass(frozen=True)
class Difference:
    """How predictions q of a text differ from predictions p that they are compared with.

    loss, expected_loss  mean of -log q and of -log p of the text's tokens, in nats
    error                |logits - expected logits| / |expected logits|, 2-norms over positions and vocabulary
    divergence           mean over positions of KL(p || q) = sum_v p_v (log p_v - log q_v), in nats
    largest              largest |log q - log p| of a token of the text
    same_first           share of positions at which both have the same likeliest token
    """

    loss: float
    expected_loss: float
    error: float
    divergence: float
    largest: float
    same_first: float

    @classmethod
    def between(cls, logits: torch.Tensor, expected: torch.Tensor, targets: torch.Tensor) -> Self:
        """logits, expected: [T, vocab_size]; targets: [T]."""
        logits, expected = logits.float(), expected.float()
        q, p = logits.log_softmax(-1), expected.log_softmax(-1)
        losses = [cross_entropy(x, targets, reduction="none") for x in (q, p)]
        return cls(
            *(x.mean().item() for x in losses),
            error=((logits - expected).norm() / expected.norm()).item(),
            divergence=kl_div(q, p, log_target=True, reduction="batchmean").item(),
            largest=(losses[0] - losses[1]).abs().max().item(),
            same_first=(q.argmax(-1) == p.argmax(-1)).float().mean().item(),
        )


@torch.inference_mode()
def logits_of(model: Model, tokens: Sequence[int], chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [T, vocab_size] in fp32 and the targets [T] of all tokens but the last one."""
    logits, targets = zip(*((x.float(), y) for x, y in predictions(model, [tokens], chunk)))
    return torch.cat(logits), torch.cat(targets)
