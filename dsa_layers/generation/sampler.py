"""Choose the next tokens of sequences from logits.

Tokens are drawn on the device of the logits. Probabilities are rounded down to integers, of which the largest is 2^45
for a vocabulary of 129280. Sums of integers are exact in any order, so on one device a row's token does not depend on
the other rows. Another device may round an exponential differently, which almost never changes a token.
"""

import random
from collections.abc import Iterator, Sequence

import numpy
import torch

from dsa_layers.batch import packing
from dsa_layers.generation.requests import Logprob, RunningSequence

# Sequences on a GPU: a draw takes ten times the memory of their logits. On a CPU one sequence fits into the caches.
_AT_ONCE = 8


def sample(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> list[list[int | None]]:
    """Return the next tokens of each of B sequences, as far as the logits reach.

    logits  fp32 [B, n, vocab_size]: after each sequence, and after its first 1 to n - 1 drafts. Each has n - 1 drafts

    The tokens of a sequence end with the first one that is not its draft, because no logits follow it. So tokens are
    those without drafts, also sampled ones, and a draft is accepted with the probability that the model gives it.
    They also end with None for a row from which no token can be chosen: it holds NaN or infinity, or only minus
    infinity. Other rows are chosen as without it. There is one transfer from the device, of token ids.
    """
    largest, best = logits.max(-1)  # the maximum of a row that holds NaN is NaN
    for rows in _groups(sequences, _AT_ONCE if logits.is_cuda else 1):
        index = packing.to_device(rows, torch.int64, logits.device)
        best[index] = _draw(logits[index], largest[index], [sequences[row] for row in rows])
    chosen = []
    for s, tokens in zip(sequences, torch.where(largest.isfinite(), best, -1).tolist()):
        accepted = next((i for i, draft in enumerate(s.drafts) if tokens[i] != draft), len(tokens) - 1)
        chosen.append([None if token < 0 else token for token in tokens[: accepted + 1]])
    return chosen


def _groups(sequences: Sequence[RunningSequence], most: int) -> Iterator[list[int]]:
    """Yield the rows of sequences that are not greedy, up to `most` at a time. Either all of them or none choose among
    the likeliest tokens only."""
    for likeliest in (False, True):
        params = [s.params for s in sequences]
        rows = [row for row, one in enumerate(params) if one.temperature > 0 and one.of_likeliest == likeliest]
        yield from (rows[i : i + most] for i in range(0, len(rows), most))


def _draw(logits: torch.Tensor, largest: torch.Tensor, sequences: Sequence[RunningSequence]) -> torch.Tensor:
    """Return int64 [B, n]: drawn tokens of logits [B, n, vocab_size], whose largest values are [B, n]."""
    _, n, vocab_size = logits.shape
    settings, most = [], 0
    for s in sequences:
        top_k = min(s.params.top_k or vocab_size, vocab_size)
        most = max(most, top_k)
        for position in range(len(s.tokens), len(s.tokens) + n):
            # Made on the host, so that all devices draw by the same numbers.
            drawn = random.Random((s.seed << 40) + position).random()
            settings.append((drawn, s.params.temperature, top_k, s.params.top_p, s.params.min_p))
    drawn, temperature, k, p, min_p = packing.to_device(list(zip(*settings)), torch.float64, logits.device)[..., None]
    rows = logits.flatten(0, 1), largest.reshape(-1, 1), temperature, drawn
    if sequences[0].params.of_likeliest:
        tokens = draw_of_likeliest(*rows, top_k=k.long(), top_p=p, min_p=min_p, most=most)
    else:
        tokens = draw(*rows)
    return tokens.view(largest.shape)


def draw(logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return int64 [B, 1]: a token of each row of logits [B, vocab_size], fp32.

    largest, temperature and numbers in [0, 1): [B, 1]; the latter two float64. The token of a row that is not finite is
    undefined.
    """
    sums = _weights(logits, largest, temperature, logits.shape[-1]).cumsum_(-1)
    return _first_beyond(sums, sums[:, -1:], numbers)


def draw_of_likeliest(
    logits: torch.Tensor,
    largest: torch.Tensor,
    temperature: torch.Tensor,
    numbers: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    most: int,
) -> torch.Tensor:
    """Return `draw` among the top_k likeliest tokens that have at least min_p of the largest probability, and of these
    among the fewest that reach top_p of their probability. Of equal tokens the lowest ids count as likelier.

    top_k int64, top_p and min_p float64, all [B, 1]; most: the largest top_k
    """
    values = _in_order(logits, most)
    weights = _weights(values, largest, temperature, logits.shape[-1])
    enough = weights >= (min_p * weights[:, :1]).long()
    top_k = torch.minimum(top_k, enough.sum(-1, keepdim=True).clamp(min=1))
    sums = weights.cumsum_(-1)
    of_all = sums.gather(1, top_k - 1)
    count = torch.minimum(top_k, 1 + torch.searchsorted(sums, (top_p * of_all).ceil().long()))
    rank = _first_beyond(sums, sums.gather(1, count - 1), numbers)
    value = values.gather(1, torch.minimum(rank, count - 1))  # a row that is not finite has any rank
    nth = (rank - torch.searchsorted(-values, -value)).int()  # among equal values
    return torch.searchsorted((logits == value).cumsum(-1, dtype=torch.int32), nth, right=True)


def _weights(logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return int64 numbers in proportion to probabilities. The sum of vocab_size of them is below 2^62."""
    # Relative to the largest, so that a tiny temperature does not overflow.
    exact = logits.double().sub_(largest).div_(temperature).exp_()
    return exact.mul_(2.0 ** (62 - vocab_size.bit_length())).long()


def _first_beyond(sums: torch.Tensor, total: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the first index whose sum is above this fraction of the total. The product may be rounded up to the
    total."""
    return torch.searchsorted(sums, torch.minimum((numbers * total).long(), total - 1), right=True)


def _in_order(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return [B, count]: the largest of each row in descending order."""
    if not logits.is_cuda:  # numpy sorts a vocabulary in less than a millisecond, torch in 20
        return torch.from_numpy(numpy.sort(logits.numpy())).flip(-1)[:, :count]
    return (logits.topk(count) if count < logits.shape[-1] else logits.sort(descending=True)).values


def penalised(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> torch.Tensor:
    """Return logits [B, n, vocab_size], fp32, with the penalties of each sequence's SamplingParams. Without penalties
    it is the same tensor.

    Row i of a sequence follows i of its drafts, which count as generated there: the row is used only if all of these
    drafts are accepted.
    """
    rows = [row for row, s in enumerate(sequences) if s.params.penalises]
    if rows:
        logits = logits.clone()
    for row in rows:
        s, params = sequences[row], sequences[row].params
        prompt, generated = s.tokens[: s.prompt_len], s.tokens[s.prompt_len :]
        counts = torch.stack([_counts([*generated, *s.drafts[:i]], logits) for i in range(logits.shape[1])])
        x = logits[row]
        repeated = torch.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
        x = torch.where((counts > 0) | (_counts(prompt, logits) > 0), repeated, x)
        logits[row] = x - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return logits


def _counts(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Return int64 [vocab_size]: how often each token occurs."""
    return packing.to_device(tokens, torch.int64, logits.device).bincount(minlength=logits.shape[-1])


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[dict[int, Logprob]]:
    """Return the log-probabilities of each chosen token of a sequence: its own, and those of the `count` likeliest.

    logits  fp32 [n, vocab_size]: the model's, before penalties and temperature; n is at least the number of tokens
    """
    values = logits[: len(tokens)].log_softmax(-1)
    own = values.gather(1, packing.to_device(tokens, torch.int64, logits.device)[:, None])
    ranks = (values >= own).sum(-1)
    top = values.topk(count)
    found = []
    listed = (own[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist())
    for token, value, rank, ids, likeliest in zip(tokens, *listed):
        others = {i: Logprob(one, n + 1) for n, (i, one) in enumerate(zip(ids, likeliest))}
        found.append({token: Logprob(value, rank)} | others)
    return found
