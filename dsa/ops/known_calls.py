"""Calls that were found in order, by all that the checks look at: they take longer than a launch, and decoding repeats
itself."""

import torch

_MOST = 4096


class KnownCalls(set[tuple]):
    """Their signatures. Forgets all when there are too many."""

    def remember(self, signature: tuple) -> None:
        if len(self) >= _MOST:
            self.clear()
        self.add(signature)


def signature(*values: object) -> tuple:
    """Of each argument: of tensors, all but the contents; of numbers, strings and dtypes, the value; of lists and
    tuples, what they hold; of others, the type."""
    found: list[object] = []
    add = found.append
    for x in values:
        if isinstance(x, torch.Tensor):
            try:
                add((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16))
            except RuntimeError:  # a sparse or nested tensor, which the checks refuse: no call is like this one
                add(object())
            continue
        add(type(x))
        if isinstance(x, (int, float, str, torch.dtype)):
            add(x)
        elif isinstance(x, (list, tuple)):
            add(signature(*x))
    return tuple(found)
