"""Calls that were found in order, by all that the checks and a launch look at: both take longer in Python than a
kernel's launch, and decoding repeats itself."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsa.runtime.call_guards import Guard, guard

_MOST = 4096  # signatures
_MOST_STEPS = 256  # of these with steps of their own
_MOST_GUARDS = 8  # of calls whose first tensors have the same shape
_MOST_ADDED = 4  # of one signature
# So often a call comes before its steps are recorded, which takes half a millisecond: once for prompts of new lengths,
# whose layers repeat each other, and not at all for single calls.
REPEATS = 8
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype))


class KnownCalls:
    """Signatures of calls in order, how often each came, and the steps of those that were recorded (`recording`).
    Forgets the oldest signature when there are too many, and the oldest steps. Threads that call the op at once may
    forget what another one has just found: what it found still holds. No lock, which a fork would copy as it is held.

    steps    signature -> steps
    guarded  shape of the first argument, None of one that is no tensor -> (guard, steps): what most calls are found by
    """

    def __init__(self) -> None:
        self.steps: dict[tuple, Callable[..., Any]] = {}
        self.guarded: dict[torch.Size | None, list[tuple[Guard, Callable[..., Any]]]] = {}
        self._times: dict[tuple, int] = {}
        self._added: dict[tuple, int] = {}

    def __contains__(self, call: tuple) -> bool:
        return call in self._times

    def remember(self, call: tuple) -> None:
        while len(self._times) >= _MOST:
            for oldest in list(self._times)[:1]:
                self._times.pop(oldest, None)
        self._times[call] = 0

    def count(self, call: tuple) -> int:
        """How often a call that is remembered came, this time included."""
        self._times[call] = times = self._times.get(call, 0) + 1
        return times

    def keep(self, call: tuple, steps: Callable[..., Any]) -> None:
        if len(self.steps) >= _MOST_STEPS:
            for oldest in list(self.steps)[:1]:
                steps_of_oldest = self.steps.pop(oldest, None)
                for shape, found in list(self.guarded.items()):
                    self.guarded[shape] = [pair for pair in found if pair[1] is not steps_of_oldest]
                self._added.pop(oldest, None)
                self.recount(oldest)
        self.steps[call] = steps

    def add_guard(
        self,
        call: tuple,
        steps: Callable[..., Any],
        arguments: tuple[Any, ...],
        in_place: Sequence[tuple[int, int]],
    ) -> None:
        """Lets this call, whose steps these are, be found by a guard from now on. Not more than a few times: one that
        no guard finds again goes by its signature."""
        if self._added.get(call, 0) >= _MOST_ADDED:
            return
        self._added[call] = self._added.get(call, 0) + 1
        like = guard(arguments, in_place)
        if like is not None:
            found = self.guarded.setdefault(first_shape(arguments), [])
            found.append((like, steps))
            del found[:-_MOST_GUARDS]

    def recount(self, call: tuple) -> None:
        """As if it had not come yet: its steps are gone, or could not be recorded."""
        self._times[call] = 0

    def forget(self) -> None:
        self._times.clear()
        self.steps.clear()
        self.guarded.clear()
        self._added.clear()


def first_shape(arguments: tuple[Any, ...]) -> torch.Size | None:
    """The shape of the first argument, None if that is no tensor, or one without a shape, which the checks refuse."""
    first = arguments[0] if arguments else None
    try:
        return first.shape if isinstance(first, torch.Tensor) else None
    except RuntimeError:  # a strided nested one
        return None


def signature(*values: object) -> tuple:
    """Of each argument: of tensors, all but the contents; of numbers, strings and dtypes, the value; of lists and
    tuples, what they hold; of others, the type."""
    found: list[object] = []
    for x in values:
        kind = type(x)
        if kind is torch.Tensor or isinstance(x, torch.Tensor):
            try:
                found += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.is_neg())
            except RuntimeError:  # a sparse or nested tensor, which the checks refuse: no call is like this one
                found.append(object())
        elif kind in _PLAIN or isinstance(x, (int, float, str)):
            found += (kind, x or repr(x))  # -0.0 is not 0.0
        elif isinstance(x, (list, tuple)):
            found += (kind, signature(*x))
        else:
            found.append(kind)
    return tuple(found)
