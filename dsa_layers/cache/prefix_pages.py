"""Prefix caching: new prompts reuse cache pages of earlier prompts that begin with the same tokens."""

from collections import Counter, OrderedDict
from collections.abc import Sequence

import torch

from dsa_layers.cache.kv_cache import PageAllocator


class PrefixPages:
    """Full pages of earlier prompts. A lookup compares all tokens of the page and all tokens before the page.

    Each page has a count of the sequences that use it. An unused page stays until `make_room` returns it to the
    allocator. `make_room` takes the least recently used page first, and never a page before the pages that follow it.

    look_ahead: number of tokens after a page that must match too, because the contents of the page depend on them
    """

    def __init__(self, allocator: PageAllocator, page_size: int, look_ahead: int = 0) -> None:
        self._allocator, self._page_size, self._look_ahead = allocator, page_size, look_ahead
        self._pages: dict[tuple[int, ...], int] = {}  # (preceding page or -1, *tokens) -> page
        self._keys: dict[int, tuple[int, ...]] = {}  # page -> its key in _pages
        self._users: Counter[int] = Counter()
        # Unused pages, the least recently used first. A sequence that uses a page also uses all preceding pages.
        # `release` appends the last page of a prompt first, so `make_room` removes a page before its preceding page.
        self.unused: OrderedDict[int, None] = OrderedDict()

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Return the pages of the longest stored prefix of `tokens`. At least one token remains after the prefix."""
        found: list[int] = []
        for _ in range((len(tokens) - 1) // self._page_size):
            page = self._pages.get(self._key(found, tokens))
            if page is None:
                break
            found.append(page)
        return found

    def common(self, tokens: Sequence[int], prompt: Sequence[int]) -> int:
        """Return the number of pages that `find(tokens)` would return if all full pages of `prompt` were stored."""
        most = min((len(tokens) - 1) // self._page_size, self.full_pages(len(prompt)))
        return next((i for i in range(most) if self._tokens(tokens, i) != self._tokens(prompt, i)), most)

    def full_pages(self, tokens: int) -> int:
        """Return the number of pages that `add` accepts for a prompt of `tokens` tokens."""
        return max(tokens - self._look_ahead, 0) // self._page_size

    def use(self, pages: Sequence[int]) -> None:
        """Increment the user count of each page. pages: the first pages of a prompt."""
        for page in pages:
            self._users[page] += 1
            self.unused.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Decrement the user count of each page. pages: the first pages of a prompt."""
        for page in reversed(pages):
            self._users[page] -= 1
            if not self._users[page]:
                self.unused[page] = None

    def add(self, before: Sequence[int], tokens: Sequence[int], page: int) -> int:
        """Store the page that follows the pages `before` of a prompt, increment its user count and return it. If a page
        with the same tokens is already stored, return this stored page. Otherwise store and return `page`, which then
        belongs to this object."""
        key = self._key(before, tokens)
        found = self._pages.setdefault(key, page)
        self._keys[found] = key
        self.use([found])
        return found

    def make_room(self, count: int) -> list[int]:
        """Return unused pages to the allocator until it has `count` free pages. Return the list of these pages."""
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
    """Copies of sequences' states at the ends of prefixes. The last page of a prefix identifies the prefix.

    If all slots are taken, a new copy overwrites the least recently used copy.

    tensors  tensors with one row per state slot
    slots    state slots reserved for the copies; no sequence uses them
    """

    def __init__(self, tensors: Sequence[torch.Tensor], slots: Sequence[int]) -> None:
        self._tensors, self._free = tensors, list(slots)
        self._slots: OrderedDict[int, int] = OrderedDict()  # last page of a prefix -> slot of the copy

    def __contains__(self, page: int) -> bool:
        return page in self._slots

    def keep(self, page: int, state_slot: int) -> None:
        """Copy the state of a sequence, unless a copy for `page` exists. The sequence's cached tokens must be exactly
        the prefix that ends with `page`."""
        if page not in self._slots:
            self._slots[page] = self._free.pop() if self._free else self._slots.popitem(last=False)[1]
            self._copy(state_slot, self._slots[page])

    def restore(self, page: int, state_slot: int) -> None:
        """Copy the state stored for `page` to `state_slot`, the slot of a sequence that begins with this prefix."""
        self._copy(self._slots[page], state_slot)
        self._slots.move_to_end(page)

    def forget(self, page: int) -> None:
        """Delete the copy for the prefix that ends with `page`, if it exists."""
        if page in self._slots:
            self._free.append(self._slots.pop(page))

    def _copy(self, source: int, target: int) -> None:
        for tensor in self._tensors:
            tensor[target].copy_(tensor[source])
