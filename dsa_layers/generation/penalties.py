"""Penalties on tokens that a sequence has, applied to logits before a token is chosen."""

from collections.abc import Iterator, Sequence

import torch

from dsa_layers.batch import packing
from dsa_layers.generation.running_sequence import RunningSequence
from dsa_layers.generation.token_counts import TokenCounts

_AT_ONCE = 8  # sequences: each needs several times the memory of its logits


def penalised(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> torch.Tensor:
    """logits [B, n, vocab_size], fp32, with the penalties of each sequence's SamplingParams; the tensor itself where no
    sequence has any.

    Row i of a sequence comes after i of its drafts, which count as generated there: a row is used only if all drafts
    before it were right. So tokens are those without drafts.
    """
    rows = [row for row, s in enumerate(sequences) if s.params.penalises]
    if not rows:
        return logits
    result = logits.clone()
    for some in (rows[i : i + _AT_ONCE] for i in range(0, len(rows), _AT_ONCE)):
        index = packing.to_device(some, torch.int64, logits.device)
        result[index] = _penalised(logits[index], [sequences[row] for row in some])
    return result


def _penalised(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> torch.Tensor:
    _, n, vocab_size = logits.shape
    counts = list(_counts(sequences, vocab_size, logits.device))
    in_prompt = torch.stack([one.in_prompt for one in counts])[:, None]
    generated = torch.stack([one.generated for one in counts])[:, None].repeat(1, n, 1)
    for i in range(n - 1):
        drafts = packing.to_device([s.drafts[i] for s in sequences], torch.int64, logits.device)
        later = generated[:, i + 1 :]
        index = drafts[:, None, None].expand(-1, later.shape[1], 1)
        later.scatter_add_(2, index, torch.ones_like(index, dtype=torch.int32))
    params = [s.params for s in sequences]
    each = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
    repetition, frequency, presence = packing.to_device(list(zip(*each)), torch.float32, logits.device)[..., None, None]
    factor = torch.where(logits > 0, 1 / repetition, repetition)
    logits = torch.where(in_prompt | (generated > 0), logits * factor, logits)
    return logits - frequency * generated - presence * (generated > 0)


def _counts(sequences: Sequence[RunningSequence], vocab_size: int, device: torch.device) -> Iterator[TokenCounts]:
    for s in sequences:
        if s.counts is None:
            s.counts = TokenCounts(s.tokens[: s.prompt_len], vocab_size, device)
        s.counts.update(s.tokens)
        yield s.counts
