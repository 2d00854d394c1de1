"""The loss of a model on text, computed as generation computes it: in chunks over a paged cache."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from dsa_layers.arguments import integer
from dsa_layers.batch.prefill import Chunk, prefill_batch
from dsa_layers.families.model import Model


@dataclass(frozen=True)
class HeldOutLoss:
    """loss: mean over the predicted tokens, in nats. seconds: of all passes."""

    loss: float
    tokens: int
    seconds: float


@torch.inference_mode()
def held_out_loss(model: Model, sequences: Sequence[Sequence[int]], *, chunk: int = 2048) -> HeldOutLoss:
    """The loss of predicting each token of the sequences, but for the first of each, from the tokens before it.

    chunk: the most tokens of a pass, at least 1.

    Raises ValueError for sequences of fewer than two tokens, and for none, and TypeError or ValueError for another
    chunk.
    """
    chunk = integer("chunk", chunk, at_least=1)
    if not sequences or min(map(len, sequences)) < 2:
        raise ValueError(f"sequences: must be lists of at least 2 tokens, got lengths {list(map(len, sequences))}")
    total = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    began = time.perf_counter()
    for logits, targets in predictions(model, sequences, chunk):
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    predicted = sum(len(tokens) - 1 for tokens in sequences)
    loss = total.item() / predicted
    return HeldOutLoss(loss, predicted, time.perf_counter() - began)


@torch.inference_mode()
def predictions(
    model: Model, sequences: Sequence[Sequence[int]], chunk: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The logits [T, vocab_size] and the targets [T] of each pass: all tokens of a sequence but the last, in parts of
    at most `chunk` tokens, sequence by sequence."""
    device, page_size = next(model.parameters()).device, model.page_size
    pages = -(-max(map(len, sequences)) // page_size)
    cache = model.make_cache(pages, page_size, device, state_slots=1)
    for tokens in sequences:
        inputs, targets = (torch.tensor(part, device=device) for part in (tokens[:-1], tokens[1:]))
        done = 0
        # Even parts: of several tokens none is alone, which would be a decoding pass, unless chunk is 1 or 2.
        for part, expected in zip(*(x.tensor_split(-(-len(inputs) // chunk)) for x in (inputs, targets))):
            batch = prefill_batch([Chunk(len(part), done, range(pages), 0)], page_size, device)
            done += len(part)
            yield model(part, batch, cache, all_tokens=True), expected
