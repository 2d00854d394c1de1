"""Draw tokens by random numbers, on the device of the logits.

Probabilities are rounded down to integers, of which the largest is 2^45 for a vocabulary of 129280. Sums of integers
are exact in any order, so on one device a row's token does not depend on the other rows. Another device may round an
exponential differently, which almost never changes a token.
"""

import random
from collections.abc import Sequence

import numpy
import torch


def random_numbers(seed: int, positions: Sequence[int]) -> list[float]:
    """Return the random numbers in [0, 1) of a sequence's tokens at these positions. They depend on nothing else, and
    are made on the host, so that all devices draw by the same numbers."""
    return [random.Random((seed << 40) + position).random() for position in positions]


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
