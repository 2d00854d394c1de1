"""Tokens drawn by random numbers, on the device of the logits.

Probabilities are rounded down to integers, of which the largest is 2^45 in a vocabulary of 129280. Sums of integers are
exact whatever their order: on one device a row's token does not depend on the rows beside it. Another device may round
an exponential otherwise, which next to never decides.
"""

import random

import numpy
import torch


class RandomStream:
    """The random numbers of one sequence, in [0, 1): of the host, so that every device draws the same."""

    def __init__(self, seed: int | None) -> None:
        """seed: None for numbers that nobody has drawn before."""
        self._random = random.Random(seed)
        self._coming: list[float] = []

    def coming(self, count: int) -> list[float]:
        """The next ones; they stay the next until they are dropped."""
        self._coming += [self._random.random() for _ in range(count - len(self._coming))]
        return self._coming[:count]

    def drop(self, count: int) -> None:
        del self._coming[:count]


def draw(logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """int64 [B, 1]: a token of each row of logits [B, vocab_size], fp32, of which the largest, temperature and a number
    in [0, 1), both float64, are [B, 1]. Of a row that is not finite any number."""
    sums = _weights(logits, largest, temperature, logits.shape[-1]).cumsum_(-1)
    return _first_beyond(sums, sums[:, -1:], numbers)


def draw_of_likeliest(
    logits: torch.Tensor,
    largest: torch.Tensor,
    temperature: torch.Tensor,
    numbers: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    most: int,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """`draw` among the top_k likeliest that have min_p of the largest probability, and of these among the fewest that
    reach top_p of their probability; of equals the lowest token ids. top_k int64, top_p and min_p float64 [B, 1]; most:
    the largest top_k; min_p: None keeps all."""
    values = _in_order(logits, most)
    weights = _weights(values, largest, temperature, logits.shape[-1])
    if min_p is not None:
        enough = weights >= (min_p * weights[:, :1]).long()
        top_k = torch.minimum(top_k, enough.sum(-1, keepdim=True).clamp(min=1))
    sums = weights.cumsum_(-1)
    of_all = sums.gather(1, top_k - 1)
    count = torch.minimum(top_k, 1 + torch.searchsorted(sums, (top_p * of_all).ceil().long()))
    rank = _first_beyond(sums, sums.gather(1, count - 1), numbers)
    value = values.gather(1, torch.minimum(rank, count - 1))  # rank is any where the row is not finite
    nth = (rank - torch.searchsorted(-values, -value)).int()  # of those that are equal
    return torch.searchsorted((logits == value).cumsum(-1, dtype=torch.int32), nth, right=True)


def _weights(logits: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """int64, in proportion to probabilities, so that vocab_size of them have a sum below 2^62."""
    # Relative to the largest: a tiny temperature must not overflow.
    exact = logits.double().sub_(largest).div_(temperature).exp_()
    return exact.mul_(2.0 ** (62 - vocab_size.bit_length())).long()


def _first_beyond(sums: torch.Tensor, total: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The first index whose sum is above that share of the total. The product may be rounded up to the total."""
    return torch.searchsorted(sums, torch.minimum((numbers * total).long(), total - 1), right=True)


def _in_order(logits: torch.Tensor, count: int) -> torch.Tensor:
    """[B, count]: the largest of each row, the largest first."""
    if not logits.is_cuda:  # numpy sorts a vocabulary in less than a millisecond, torch in 20
        return torch.from_numpy(numpy.sort(logits.numpy())).flip(-1)[:, :count]
    return (logits.topk(count) if count < logits.shape[-1] else logits.sort(descending=True)).values
