"""Copies of what caches keep by sequence, as it was at the ends of prefixes."""

from collections import OrderedDict
from collections.abc import Sequence

from dsa_layers.cache.cache import Cache
from dsa_layers.cache.prefix_tree import CachedPage


class StateCopies:
    """A prefix is named by its last page. Its copy is in a state slot that no sequence has; where all of these are
    taken, the least recently used copy is overwritten.

    caches: with the same numbers of state slots, of which `count` are taken from the first cache.
    """

    def __init__(self, caches: Sequence[Cache], count: int) -> None:
        self._tensors = [tensor for cache in caches for tensor in cache.state_tensors()]
        self._spare = caches[0].state_slots.allocate(count)
        self._slots: OrderedDict[CachedPage, int] = OrderedDict()

    def __contains__(self, prefix: CachedPage) -> bool:
        return prefix in self._slots

    def keep(self, prefix: CachedPage, state_slot: int) -> None:
        """state_slot: of a sequence that has the tokens of the prefix and no others in the cache."""
        if prefix in self._slots:
            return
        slot = self._spare.pop() if self._spare else self._slots.popitem(last=False)[1]
        self._copy(state_slot, slot)
        self._slots[prefix] = slot

    def restore(self, prefix: CachedPage, state_slot: int) -> None:
        """To the state slot of a sequence that begins with the prefix."""
        self._copy(self._slots[prefix], state_slot)
        self._slots.move_to_end(prefix)

    def forget(self, prefix: CachedPage) -> None:
        """There may be none."""
        if prefix in self._slots:
            self._spare.append(self._slots.pop(prefix))

    def _copy(self, source: int, target: int) -> None:
        for tensor in self._tensors:
            tensor[target].copy_(tensor[source])
