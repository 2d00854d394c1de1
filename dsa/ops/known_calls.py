"""Calls that were found in order, by all that the checks and a launch look at: both take longer in Python than a
kernel's launch, and decoding repeats itself."""

from collections.abc import Callable
from typing import Any

import torch

_MOST = 4096  # signatures
_MOST_STEPS = 256  # of these with steps of their own
# So often a call comes before its steps are recorded, which takes half a millisecond: once for prompts of new lengths,
# whose layers repeat each other, and not at all for single calls.
REPEATS = 8
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype))


class KnownCalls:
    """Signatures of calls in order, how often each came, and the steps of those that were recorded (`recording`).
    Forgets all signatures when there are too many, and of steps the oldest."""

    def __init__(self) -> None:
        self.steps: dict[tuple, Callable[..., Any]] = {}
        self._times: dict[tuple, int] = {}

    def __contains__(self, call: tuple) -> bool:
        return call in self._times

    def remember(self, call: tuple) -> None:
        if len(self._times) >= _MOST:
            self.forget()
        self._times[call] = 0

    def count(self, call: tuple) -> int:
        """How often a call that is remembered came, this time included."""
        self._times[call] = times = self._times.get(call, 0) + 1
        return times

    def keep(self, call: tuple, steps: Callable[..., Any]) -> None:
        if len(self.steps) >= _MOST_STEPS:
            oldest = next(iter(self.steps))
            del self.steps[oldest]
            self.recount(oldest)
        self.steps[call] = steps

    def recount(self, call: tuple) -> None:
        """As if it had not come yet: its steps are gone, or could not be recorded."""
        self._times[call] = 0

    def forget(self) -> None:
        self._times.clear()
        self.steps.clear()


def signature(*values: object) -> tuple:
    """Of each argument: of tensors, all but the contents; of numbers, strings and dtypes, the value; of lists and
    tuples, what they hold; of others, the type."""
    found: list[object] = []
    for x in values:
        kind = type(x)
        if kind is torch.Tensor or isinstance(x, torch.Tensor):
            try:
                found += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15)
            except RuntimeError:  # a sparse or nested tensor, which the checks refuse: no call is like this one
                found.append(object())
        elif kind in _PLAIN or isinstance(x, (int, float, str)):
            found += (kind, x or repr(x))  # -0.0 is not 0.0
        elif isinstance(x, (list, tuple)):
            found += (kind, signature(*x))
        else:
            found.append(kind)
    return tuple(found)
