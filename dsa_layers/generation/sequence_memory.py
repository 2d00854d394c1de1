"""The pages and the state slot of each running sequence, and the prefix cache: pages and states that prompts share."""

from collections import Counter, OrderedDict
from collections.abc import Sequence

import torch

from dsa_layers.cache.kv_cache import Cache, PageAllocator
from dsa_layers.generation.engine_options import Capacity, EngineOptions
from dsa_layers.generation.requests import RunningSequence


class SequenceMemory:
    """The pages and state slots of running sequences. `start` allocates all memory of a sequence: a state slot, and
    pages for its prompt, all its new tokens and the drafts after them.

    With a prefix cache, a sequence shares its first pages with an earlier prompt that begins with the same tokens. Only
    full pages of prompts are shared, and the last token of a prompt is always computed. So a sequence never writes to a
    shared page. A sequence waits to start while another sequence computes pages that both can share.

    If the caches store a state per sequence, a prefix can be shared only if there is a copy of the state at the end of
    the prefix. Copies are made at the end of a prompt's last full page, and at the end of the pages that two prompts
    have in common. With drafts, the token after a shared page must match too, because a drafter's cache entry for a
    position depends on the next token.

    caches  the model's cache, and the drafter's cache if there is one. A sequence has the same page numbers and the
            same state slot in both
    """

    def __init__(self, caches: Sequence[Cache], capacity: Capacity, options: EngineOptions) -> None:
        self._cache, self._capacity, self._shares = caches[0], capacity, options.prefix_cache
        look_ahead = min(options.draft_tokens, 1)
        self._prefixes = PrefixPages(self._cache.allocator, self._cache.page_size, look_ahead)
        slots = self._cache.state_slots.allocate(capacity.sequences if self._shares else 0)
        tensors = [tensor for cache in caches for tensor in cache.state_tensors()]
        self._copies = StateCopies(tensors, slots) if slots and tensors else None

    def start(self, s: RunningSequence, running: Sequence[RunningSequence]) -> bool:
        """Allocate the memory of `s` and return True. Return False if `s` has to wait. running: the sequences that have
        memory."""
        if not self._cache.state_slots.free:
            return False
        found = self._prefixes.find(s.tokens) if self._shares else []
        have = len(found)
        while have and self._copies is not None and found[have - 1] not in self._copies:
            have -= 1
        shared, count = found[:have], self._capacity.of(s.limit) - have
        unused = self._prefixes.unused
        room = self._cache.allocator.free + len(unused) - sum(page in unused for page in shared)
        if count > room or (self._shares and self._more_is_computed(s, have, running)):
            return False
        self._prefixes.use(shared)
        for page in self._prefixes.make_room(count):
            if self._copies is not None:
                self._copies.forget(page)
        s.pages, s.shared = shared + self._cache.allocator.allocate(count), have
        (s.state_slot,) = self._cache.state_slots.allocate(1)
        s.cached = have * self._cache.page_size
        if self._copies is not None:
            s.stops = {n * self._cache.page_size for n in (len(found), self._prefixes.full_pages(s.prompt_len))}
            if shared:
                self._copies.restore(shared[-1], s.state_slot)
        return True

    def _more_is_computed(self, s: RunningSequence, have: int, running: Sequence[RunningSequence]) -> bool:
        """Return whether a running sequence is computing pages that `s` could share, after the first `have` pages of
        `s`. If there are states, make a prefill pass of that sequence stop at the end of these pages, so that its state
        is copied there."""
        for other in running:
            if not other.prefilling:
                continue
            common = self._prefixes.common(s.tokens, other.tokens)
            end = common * self._cache.page_size
            if common > have and end > other.cached:
                if self._copies is not None:
                    other.stops.add(end)
                return True
        return False

    def next_stop(self, s: RunningSequence) -> int:
        """Return the largest number of tokens of `s` that may be in the cache after the next prefill pass."""
        return min((n for n in s.stops if n > s.cached), default=s.prompt_len)

    def computed(self, s: RunningSequence) -> None:
        """Call this after a prefill pass over `s`. With a prefix cache, store the prompt's full pages, and copy the
        state if the pass ended at one of `s.stops`. If a page with the same tokens is already stored, use the stored
        page and release the page of `s`."""
        if not self._shares:
            return
        for i in range(s.shared, min(s.cached // self._cache.page_size, self._prefixes.full_pages(s.prompt_len))):
            page = self._prefixes.add(s.pages[:i], s.tokens, s.pages[i])
            if page != s.pages[i]:
                self._cache.allocator.release([s.pages[i]])
            s.pages[i], s.shared = page, i + 1
        if self._copies is not None and s.cached in s.stops and s.shared:
            self._copies.keep(s.pages[s.shared - 1], s.state_slot)

    def release(self, s: RunningSequence) -> None:
        """Release the memory that `start` has allocated for `s`."""
        self._prefixes.release(s.pages[: s.shared])
        self._cache.allocator.release(s.pages[s.shared :])
        self._cache.state_slots.release([s.state_slot])


class PrefixPages:
    """Full pages of earlier prompts. A page is identified by its tokens and all tokens before it. Pages that no
    sequence uses stay until `make_room` frees them: the least recently used page first, and a page only after the pages
    that follow it in prompts.

    allocator   the allocator of the cache's pages
    look_ahead  number of tokens after a page that must match too, because the contents of the page depend on them
    """

    def __init__(self, allocator: PageAllocator, page_size: int, look_ahead: int = 0) -> None:
        self._allocator, self._page_size, self._look_ahead = allocator, page_size, look_ahead
        self._pages: dict[tuple[int, ...], int] = {}  # (preceding page or -1, *tokens) -> page
        self._keys: dict[int, tuple[int, ...]] = {}  # page -> its key in _pages
        self._users: Counter[int] = Counter()
        # Unused pages, the least recently used first. A sequence that uses a page also uses all preceding pages, and
        # `release` appends these pages from last to first. So `make_room` frees each page before its predecessor.
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
        """Return the number of pages that `find(tokens)` would return if the first `full_pages(len(prompt))` pages of
        `prompt` were stored."""
        most = min((len(tokens) - 1) // self._page_size, self.full_pages(len(prompt)))
        return next((i for i in range(most) if self._tokens(tokens, i) != self._tokens(prompt, i)), most)

    def full_pages(self, tokens: int) -> int:
        """Return how many pages of a prompt of `tokens` tokens can be stored: full pages with look-ahead tokens after
        them."""
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
        """Store `page`, which follows the pages `before` of the prompt `tokens`, and return it. If a page for the same
        tokens is already stored, return the stored page instead. Increment the user count of the returned page."""
        key = self._key(before, tokens)
        found = self._pages.setdefault(key, page)
        self._keys[found] = key
        self.use([found])
        return found

    def make_room(self, count: int) -> list[int]:
        """Free unused pages until the allocator has `count` free pages. Return the freed pages."""
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
    """Copies of sequences' states at the ends of prefixes. A prefix is identified by its last page. If all slots are
    taken, a new copy overwrites the least recently used copy.

    tensors  tensors with one row per state slot
    slots    state slots for the copies; no sequence uses them
    """

    def __init__(self, tensors: Sequence[torch.Tensor], slots: Sequence[int]) -> None:
        self._tensors, self._free = tensors, list(slots)
        self._slots: OrderedDict[int, int] = OrderedDict()  # last page of a prefix -> slot of the copy

    def __contains__(self, page: int) -> bool:
        return page in self._slots

    def keep(self, page: int, state_slot: int) -> None:
        """Copy the state in `state_slot`, unless a copy for `page` exists. The cached tokens of the slot's sequence
        must be exactly the prefix that ends with `page`."""
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
