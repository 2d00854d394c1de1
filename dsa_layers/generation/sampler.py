"""Choose the next tokens of sequences from logits.

Tokens are sampled on the device of the logits. The probabilities of a row of logits are scaled and rounded down to
integers (`_weights`). Sums of integers are exact in any order, so on one device a row's token does not depend on the
other rows. Another device may round an exponential differently and so choose another token.
"""

import random
from collections.abc import Iterator, Sequence

import numpy
import torch

from dsa_layers.batch import packing
from dsa_layers.generation.requests import Logprob, RunningSequence

# The largest number of sequences that a GPU samples at once. It is small, because sampling takes several times the
# memory of their logits. A CPU samples one sequence at a time, so that the data fit into its caches.
_AT_ONCE = 8


def sample(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> list[list[int | None]]:
    """Return the next 1 to n tokens of each of B sequences. Each sequence has n - 1 drafts.

    logits  fp32 [B, n, vocab_size]: row i of a sequence has the logits after its tokens and its first i drafts

    A sequence's tokens end with the first token that differs from its draft, because the logits of later rows follow
    the draft instead of this token. So if drafts leave the logits unchanged, they also leave the tokens unchanged,
    including sampled ones. At a row whose maximum is NaN or infinite, no token can be chosen, and the sequence's tokens
    end with None.
    """
    largest, best = logits.max(-1)  # the maximum of a row that contains NaN is NaN
    for rows in _groups(sequences, _AT_ONCE if logits.is_cuda else 1):
        index = packing.to_device(rows, torch.int64, logits.device)
        best[index] = _draw(logits[index], largest[index], [sequences[row] for row in rows])
    chosen = []
    for s, tokens in zip(sequences, torch.where(largest.isfinite(), best, -1).tolist()):
        accepted = next((i for i, draft in enumerate(s.drafts) if tokens[i] != draft), len(tokens) - 1)
        chosen.append([None if token < 0 else token for token in tokens[: accepted + 1]])
    return chosen


def _groups(sequences: Sequence[RunningSequence], most: int) -> Iterator[list[int]]:
    """Yield the indices of the sequences that are not greedy, in groups of up to `most`. All sequences of a group have
    the same `SamplingParams.of_likeliest`."""
    for likeliest in (False, True):
        params = [s.params for s in sequences]
        rows = [row for row, one in enumerate(params) if one.temperature > 0 and one.of_likeliest == likeliest]
        yield from (rows[i : i + most] for i in range(0, len(rows), most))


def _draw(logits: torch.Tensor, largest: torch.Tensor, sequences: Sequence[RunningSequence]) -> torch.Tensor:
    """Return int64 [B, n]: a sampled token for each row of logits [B, n, vocab_size]. largest [B, n]: row maxima.
    sequences: a group from `_groups`."""
    _, n, vocab_size = logits.shape
    settings, most = [], 0
    for s in sequences:
        top_k = min(s.params.top_k or vocab_size, vocab_size)
        most = max(most, top_k)
        for position in range(len(s.tokens), len(s.tokens) + n):
            # Compute random numbers on the host, so that all devices use the same numbers.
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
    """Return int64 [B, 1]: a token for each of B rows, sampled from the row's logits.

    logits       fp32 [B, vocab_size]
    largest      fp32 [B, 1]: the maximum of each row. If it is not finite, the row's token is undefined
    temperature  float64 [B, 1]
    numbers      float64 [B, 1]: a random number in [0, 1) for each row
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
    """Return int64 [B, 1]: a token for each row, sampled from the likeliest tokens only. `draw` documents the first
    four parameters.

    Among the top_k likeliest tokens, keep those with at least min_p times the largest probability. Among the kept
    tokens, sample from the likeliest: the fewest whose probabilities reach top_p times the sum over the kept tokens. Of
    tokens with equal logits, the token with the lower id ranks first.

    top_k  int64 [B, 1]
    top_p  float64 [B, 1]
    min_p  float64 [B, 1]
    most   the maximum of top_k
    """
    values = _in_order(logits, most)
    weights = _weights(values, largest, temperature, logits.shape[-1])
    enough = weights >= (min_p * weights[:, :1]).long()
    top_k = torch.minimum(top_k, enough.sum(-1, keepdim=True).clamp(min=1))
    sums = weights.cumsum_(-1)
    of_all = sums.gather(1, top_k - 1)
    count = torch.minimum(top_k, 1 + torch.searchsorted(sums, (top_p * of_all).ceil().long()))
    rank = _first_beyond(sums, sums.gather(1, count - 1), numbers)
    value = values.gather(1, torch.minimum(rank, count - 1))  # the rank is out of range only if the row is not finite
    nth = (rank - torch.searchsorted(-values, -value)).int()  # the token's index among those with equal logits
    return torch.searchsorted((logits == value).cumsum(-1, dtype=torch.int32), nth, right=True)


def _weights(logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return int64 weights, proportional to the row's probabilities and rounded down. vocab_size weights sum to below
    2^62. The first three arguments are those of `draw`, but `logits` may have only the largest logits of each row."""
    # Subtract the maximum first, so that exp does not overflow with a tiny temperature.
    exact = logits.double().sub_(largest).div_(temperature).exp_()
    return exact.mul_(2.0 ** (62 - vocab_size.bit_length())).long()


def _first_beyond(sums: torch.Tensor, total: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return int64 [B, 1]: in each row, the first index at which the cumulative sums `sums` exceed numbers * total. The
    product is limited to total - 1, because it may round up to `total`."""
    return torch.searchsorted(sums, torch.minimum((numbers * total).long(), total - 1), right=True)


def _in_order(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Return [B, count]: the largest logits of each row in descending order."""
    if not logits.is_cuda:  # numpy sorts a vocabulary several times as fast as torch
        return torch.from_numpy(numpy.sort(logits.numpy())).flip(-1)[:, :count]
    return (logits.topk(count) if count < logits.shape[-1] else logits.sort(descending=True)).values


def penalised(logits: torch.Tensor, sequences: Sequence[RunningSequence]) -> torch.Tensor:
    """Return fp32 logits [B, n, vocab_size] after the penalties of each sequence's SamplingParams. If no sequence has
    penalties, return `logits` itself.

    Row i of a sequence counts the sequence's first i drafts as generated tokens, because `sample` uses row i only if it
    accepts these drafts.
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
    """Return int64 [vocab_size]: the number of occurrences of each token id in `tokens`."""
    return packing.to_device(tokens, torch.int64, logits.device).bincount(minlength=logits.shape[-1])


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], count: int) -> list[dict[int, Logprob]]:
    """For each of `tokens`, the chosen tokens of a sequence, return a dictionary from token id to `Logprob`. It
    contains the chosen token and the `count` likeliest tokens of the same row.

    logits  fp32 [n, vocab_size]: the model's logits, before penalties and temperature. n is at least len(tokens)
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
