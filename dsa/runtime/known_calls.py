"""Remember calls that passed the checks.

Checks and the Python of a launch take longer than the launch of a kernel, and decoding repeats its calls. A call is
known by its signature: everything that the checks and the launch look at.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dsa.runtime.call_guards import Guard, guard

_MOST = 4096  # signatures
_MOST_STEPS = 256  # recorded calls
_MOST_GUARDS = 8  # guards of calls whose first tensors have the same shape
_MOST_ADDED = 4  # guards of one signature
# A call is recorded when it comes for the eighth time. Recording takes half a millisecond. A prompt of a new length
# pays once, because its layers repeat each other's calls; a single call does not pay.
REPEATS = 8
_PLAIN = frozenset((type(None), bool, int, float, str, torch.dtype))


class KnownCalls:
    """Signatures of valid calls, how often each came, and the steps of recorded calls (`recording`).

    When there are too many signatures or steps, the oldest are forgotten. Threads may call the op at the same time: one
    may forget what another has just found, which stays valid. There is no lock, because a fork may copy a held lock.

    steps    signature -> steps
    guarded  shape of the first argument, or None if that is not a tensor -> (guard, steps). Most calls are found here
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
        """Count a remembered call, and return how often it came, including this time."""
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
        """Add a guard that finds this call and its steps. A signature gets a few guards at most: a call that no guard
        finds is looked up by its signature."""
        if self._added.get(call, 0) >= _MOST_ADDED:
            return
        self._added[call] = self._added.get(call, 0) + 1
        like = guard(arguments, in_place)
        if like is not None:
            found = self.guarded.setdefault(first_shape(arguments), [])
            found.append((like, steps))
            del found[:-_MOST_GUARDS]

    def recount(self, call: tuple) -> None:
        """Start counting again: the steps are forgotten, or could not be recorded."""
        self._times[call] = 0

    def forget(self) -> None:
        self._times.clear()
        self.steps.clear()
        self.guarded.clear()
        self._added.clear()


def first_shape(arguments: tuple[Any, ...]) -> torch.Size | None:
    """Return the shape of the first argument; None if it is not a tensor, or a nested one, which the checks refuse."""
    first = arguments[0] if arguments else None
    try:
        return first.shape if isinstance(first, torch.Tensor) else None
    except RuntimeError:  # a nested tensor
        return None


def signature(*values: object) -> tuple:
    """Return what the checks and launches see of the arguments.

    Of a tensor that is everything but its contents, of numbers, strings and dtypes the value, of lists and tuples their
    items, of other objects the type.
    """
    found: list[object] = []
    for x in values:
        kind = type(x)
        if kind is torch.Tensor or isinstance(x, torch.Tensor):
            try:
                found += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.is_neg())
            except RuntimeError:  # a sparse or nested tensor, which the checks refuse: equal to no other call
                found.append(object())
        elif kind in _PLAIN or isinstance(x, (int, float, str)):
            found += (kind, x or repr(x))  # -0.0 is not 0.0
        elif isinstance(x, (list, tuple)):
            found += (kind, signature(*x))
        else:
            found.append(kind)
    return tuple(found)
