"""Choose the next tokens of sequences from logits."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from dsa_layers.batch import packing
from dsa_layers.generation.draws import draw, draw_of_likeliest, random_numbers
from dsa_layers.generation.results import Logprob
from dsa_layers.generation.sampling import SamplingParams

# Sequences on a GPU: a draw takes ten times the memory of their logits. On a CPU one sequence fits into the caches.
_AT_ONCE = 8


class Sampled(Protocol):
    """A sequence of which the sampler chooses tokens. The first `prompt_len` of its tokens are the prompt; drafts are
    guesses of the tokens that follow."""

    tokens: list[int]
    prompt_len: int
    drafts: list[int]
    params: SamplingParams
    seed: int


def sample(logits: torch.Tensor, sequences: Sequence[Sampled]) -> list[list[int | None]]:
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


def _groups(sequences: Sequence[Sampled], most: int) -> Iterator[list[int]]:
    """Yield the rows of sequences that are not greedy, up to `most` at a time. Either all of them or none choose among
    the likeliest tokens only."""
    for likeliest in (False, True):
        params = [s.params for s in sequences]
        rows = [row for row, one in enumerate(params) if one.temperature > 0 and one.of_likeliest == likeliest]
        yield from (rows[i : i + most] for i in range(0, len(rows), most))


def _draw(logits: torch.Tensor, largest: torch.Tensor, sequences: Sequence[Sampled]) -> torch.Tensor:
    """Return int64 [B, n]: drawn tokens of logits [B, n, vocab_size], whose largest values are [B, n]."""
    _, n, vocab_size = logits.shape
    settings, most = [], 0
    for s in sequences:
        top_k = min(s.params.top_k or vocab_size, vocab_size)
        most = max(most, top_k)
        for drawn in random_numbers(s.seed, range(len(s.tokens), len(s.tokens) + n)):
            settings.append((drawn, s.params.temperature, top_k, s.params.top_p, s.params.min_p))
    drawn, temperature, k, p, min_p = packing.to_device(list(zip(*settings)), torch.float64, logits.device)[..., None]
    rows = logits.flatten(0, 1), largest.reshape(-1, 1), temperature, drawn
    if sequences[0].params.of_likeliest:
        tokens = draw_of_likeliest(*rows, top_k=k.long(), top_p=p, min_p=min_p, most=most)
    else:
        tokens = draw(*rows)
    return tokens.view(largest.shape)


def penalised(logits: torch.Tensor, sequences: Sequence[Sampled]) -> torch.Tensor:
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


def logprobs_of(
    logits: torch.Tensor, chosen: Sequence[Sequence[int | None]], counts: Sequence[int | None]
) -> list[list[dict[int, Logprob] | None]]:
    """Return the log-probabilities of the tokens chosen for B sequences. Each token has its own Logprob and those of
    the `counts` likeliest tokens, or None if the sequence's count is None.

    logits  fp32 [B, n, vocab_size]: the model's, before penalties and temperature
    chosen  up to n tokens of each sequence, of which the last one may be None

    Transfers from the device only if there is a count.
    """
    found: list[list[dict[int, Logprob] | None]] = [[None] * len(tokens) for tokens in chosen]
    places = [
        (row, i)
        for row, tokens in enumerate(chosen)
        for i, token in enumerate(tokens)
        if counts[row] is not None and token is not None
    ]
    if not places:
        return found
    rows, columns = packing.to_device(list(zip(*places)), torch.int64, logits.device)
    values = logits[rows, columns].log_softmax(-1)
    tokens = packing.to_device([chosen[row][i] for row, i in places], torch.int64, logits.device)[:, None]
    own = values.gather(1, tokens)
    ranks = (values >= own).sum(-1)
    top = values.topk(min(max(counts[row] for row, _ in places), values.shape[-1]))
    listed = (own[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist())
    for (row, i), value, rank, ids, likeliest in zip(places, *listed):
        of_token = {chosen[row][i]: Logprob(value, rank)}
        pairs = zip(ids[: counts[row]], likeliest)
        found[row][i] = of_token | {token: Logprob(one, n + 1) for n, (token, one) in enumerate(pairs)}
    return found
