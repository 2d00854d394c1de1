"""Log-probabilities of generated tokens."""

from collections.abc import Sequence

import torch

from dsa_layers.batch import packing
from dsa_layers.generation.results import Logprob


def logprobs_of(
    logits: torch.Tensor, chosen: Sequence[Sequence[int | None]], counts: Sequence[int | None]
) -> list[list[dict[int, Logprob] | None]]:
    """For each of the tokens chosen for B sequences: its Logprob and those of the likeliest `counts` tokens, None for a
    sequence whose count is None.

    logits fp32 [B, n, vocab_size]: the model's, before penalties and temperature; chosen: up to n tokens of each, the
    last of which may be None, for one that could not be chosen. Transfers from the device only if a count is given.
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
