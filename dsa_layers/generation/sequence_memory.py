"""The pages and the state slot of each running sequence."""

from collections.abc import Sequence

from dsa_layers.cache.cache import Cache
from dsa_layers.cache.prefix_pages import PrefixPages, StateCopies
from dsa_layers.generation.engine_options import Capacity, EngineOptions
from dsa_layers.generation.requests import RunningSequence


class SequenceMemory:
    """The pages and state slots of running sequences. `start` allocates a sequence's memory: a state slot, and pages
    for its prompt, all its new tokens and the drafts after them. So no running sequence is ever evicted.

    With a prefix cache, a sequence shares its first pages with an earlier prompt that begins with the same tokens. Only
    full pages of prompts are shared, and the last token of a prompt is always computed. So a sequence never writes to a
    shared page. A sequence waits to start while another sequence computes pages that both can share.

    If the caches store a state per sequence, a prefix can be shared only if there is a copy of the state at its end.
    Copies are made at two places: at the end of a prompt's last full page, and at the end of the pages that two prompts
    have in common. A drafter's cache entry for a position depends on the next token. So with drafts, two pages are
    equal only if the tokens after them are equal too.

    caches  the model's cache, and the drafter's cache if there is one. Both have the same pages and state slots
    """

    def __init__(self, caches: Sequence[Cache], capacity: Capacity, options: EngineOptions) -> None:
        self._cache, self._capacity, self._shares = caches[0], capacity, options.prefix_cache
        look_ahead = min(options.draft_tokens, 1)
        self._prefixes = PrefixPages(self._cache.allocator, self._cache.page_size, look_ahead)
        slots = self._cache.state_slots.allocate(capacity.sequences if self._shares else 0)
        tensors = [tensor for cache in caches for tensor in cache.state_tensors()]
        self._copies = StateCopies(tensors, slots) if slots and tensors else None

    def start(self, s: RunningSequence, running: Sequence[RunningSequence]) -> bool:
        """Allocate the memory of a sequence and return True. Return False if the sequence has to wait.

        running  the sequences that have started and not ended
        """
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
        """Return whether a running sequence is computing pages that `s` could share, after its first `have` pages."""
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
        """Return the largest number of prompt tokens that may be in the cache after the next pass."""
        return min((n for n in s.stops if n > s.cached), default=s.prompt_len)

    def computed(self, s: RunningSequence) -> None:
        """Make the full pages of a prompt available to other sequences after a pass over it. If another sequence has
        computed the same page in the meantime, use that sequence's page and release this one."""
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
        """Release the memory of a sequence that has started."""
        self._prefixes.release(s.pages[: s.shared])
        self._cache.allocator.release(s.pages[s.shared :])
        self._cache.state_slots.release([s.state_slot])
