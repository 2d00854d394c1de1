"""Pages of earlier prompts, found by their tokens."""

from collections import Counter, OrderedDict
from collections.abc import Sequence

import torch

from dsa_layers.cache.cache import PageAllocator


class PrefixPages:
    """Full pages of prompts. A page is found by its tokens and by all tokens before them, compared one by one.

    Each page counts the sequences that use it. An unused page stays until `make_room` gives it back to the allocator:
    the least recently used page first, and no page before the pages that follow it.

    look_ahead: tokens after a page that must be the same too, because the content of the page depends on them
    """

    def __init__(self, allocator: PageAllocator, page_size: int, look_ahead: int = 0) -> None:
        self._allocator, self._page_size, self._look_ahead = allocator, page_size, look_ahead
        self._pages: dict[tuple[int, ...], int] = {}  # (the page before, the tokens) -> the page
        self._keys: dict[int, tuple[int, ...]] = {}  # the inverse
        self._users: Counter[int] = Counter()
        # The least recently used page first. A sequence uses all pages before a page that it uses, and releases the
        # last of them first, so pages come before the pages that they follow.
        self.unused: OrderedDict[int, None] = OrderedDict()

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages of the longest known prefix of `tokens`. At least one token remains after the prefix."""
        found: list[int] = []
        for _ in range((len(tokens) - 1) // self._page_size):
            page = self._pages.get(self._key(found, tokens))
            if page is None:
                break
            found.append(page)
        return found

    def common(self, tokens: Sequence[int], prompt: Sequence[int]) -> int:
        """Return the number of pages of `prompt` that `find(tokens)` would find, if they were all known."""
        most = min((len(tokens) - 1) // self._page_size, self.full_pages(len(prompt)))
        return next((i for i in range(most) if self._tokens(tokens, i) != self._tokens(prompt, i)), most)

    def full_pages(self, tokens: int) -> int:
        """Return the number of pages of a prompt with this many tokens that can be added."""
        return max(tokens - self._look_ahead, 0) // self._page_size

    def use(self, pages: Sequence[int]) -> None:
        """Add a user to the first pages of a prompt."""
        for page in pages:
            self._users[page] += 1
            self.unused.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Remove a user from the first pages of a prompt."""
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                self.unused[page] = None

    def add(self, before: Sequence[int], tokens: Sequence[int], page: int) -> int:
        """Add a user to the page that follows the pages `before` of a prompt, and return it. It is the known page with
        these tokens; if there is none, it is `page`, which then belongs to this object."""
        key = self._key(before, tokens)
        found = self._pages.setdefault(key, page)
        self._keys[found] = key
        self.use([found])
        return found

    def make_room(self, count: int) -> list[int]:
        """Give unused pages back to the allocator until `count` pages are free there. Return these pages."""
        given = []
        while self._allocator.free < count:
            page, _ = self.unused.popitem(last=False)
            del self._pages[self._keys.pop(page)]
            self._allocator.release([page])
            given.append(page)
        return given

    def _key(self, before: Sequence[int], tokens: Sequence[int]) -> tuple[int, ...]:
        return (before[-1] if before else -1, *self._tokens(tokens, len(before)))

    def _tokens(self, tokens: Sequence[int], i: int) -> Sequence[int]:
        begin = i * self._page_size
        return tokens[begin : begin + self._page_size + self._look_ahead]


class StateCopies:
    """Copies of what caches store per sequence, made at the ends of prefixes. A prefix is named by its last page.

    A new copy overwrites the least recently used one if all slots are taken.

    tensors  those that have a row for each state slot
    slots    state slots for the copies, which no sequence uses
    """

    def __init__(self, tensors: Sequence[torch.Tensor], slots: Sequence[int]) -> None:
        self._tensors, self._free = tensors, list(slots)
        self._slots: OrderedDict[int, int] = OrderedDict()  # last page of a prefix -> slot of the copy

    def __contains__(self, page: int) -> bool:
        return page in self._slots

    def keep(self, page: int, state_slot: int) -> None:
        """Copy the state of a sequence, unless there is a copy for `page`. The tokens that the sequence has in the
        cache are exactly the prefix that ends with `page`."""
        if page not in self._slots:
            self._slots[page] = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            self._copy(state_slot, self._slots[page])

    def restore(self, page: int, state_slot: int) -> None:
        """Copy a state to the slot of a sequence that begins with the prefix."""
        self._copy(self._slots[page], state_slot)
        self._slots.move_to_end(page)

    def forget(self, page: int) -> None:
        """Drop the copy of a prefix, if there is one."""
        if page in self._slots:
            self._free.append(self._slots.pop(page))

    def _copy(self, source: int, target: int) -> None:
        for tensor in self._tensors:
            tensor[target].copy_(tensor[source])
