"""What batches ask of what they are made of: types, dtypes, shapes and devices, and numbers of the host. Nothing looks
at a tensor's contents, for which the host would have to wait."""

from collections.abc import Sequence
from operator import le

import torch

from dsa.runtime.checks import INT32, INT_MAX, check_tensor
from dsa_layers.arguments import integer, shown


def integers(name: str, values: Sequence[int]) -> tuple[int, ...]:
    """`values` as a tuple; TypeError for what is no list of integers."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{name}: must be a list of integers, got {shown(values)}")
    if set(map(type, values)) <= {int}:  # as a rule; a long context has thousands of pages
        return tuple(values)
    return tuple(integer(f"{name}[{i}]", value) for i, value in enumerate(values))


def positive(name: str, lens: Sequence[int]) -> tuple[int, ...]:
    """How many new tokens each sequence has."""
    lens = integers(name, lens)
    if min(lens, default=1) < 1:
        raise ValueError(f"{name}: every sequence needs at least one new token, got {shown(list(lens))}")
    return lens


def distinct_slots(state_slots: Sequence[int] | None, sequences: int) -> tuple[int, ...] | None:
    """Each sequence's own row of what a cache keeps by sequence, if it has one."""
    if state_slots is None:
        return None
    slots = integers("state_slots", state_slots)
    different = sequences == len(slots) == len(set(slots))
    if not different or min(slots, default=0) < 0 or max(slots, default=0) > INT_MAX:
        raise ValueError(
            f"state_slots: must be {sequences} different numbers, one a sequence, got {shown(list(slots))}"
        )
    return slots


def check_key_lens(query_lens: Sequence[int], key_lens: Sequence[int], room: Sequence[int] | None) -> None:
    """Each sequence has its new tokens, and not more than there is room for in its pages, if it has any."""
    if all(map(le, query_lens, key_lens)) and (room is None or all(map(le, key_lens, room))):
        return
    for i, (new, total) in enumerate(zip(query_lens, key_lens)):
        if room is None and total < new:
            raise ValueError(f"key_lens[{i}]: must be at least query_lens[{i}]={new}, got {shown(total)}")
        if room is not None and not new <= total <= room[i]:
            raise ValueError(
                f"key_lens[{i}]: must be between query_lens[{i}]={new} and the {room[i]} tokens of its pages, got "
                f"{shown(total)}"
            )


def check_of_sequences(
    name: str, tensor: object, sequences: int, device: torch.device, source: str, *more: str
) -> None:
    """`tensor` is int32 [sequences, *more] on a device, which may have no index. source: what has their number."""
    check_tensor(name, tensor, INT32, (sequences, *more), source)
    own = tensor.device
    if own.type != device.type or (device.index is not None and own.index != device.index):
        raise ValueError(f"{name}: must be on the batch's device {device}, got {own}")
