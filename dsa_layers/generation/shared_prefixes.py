"""Pages that sequences share where their prompts begin with the same tokens."""

from collections.abc import Sequence

from dsa_layers.cache.cache import Cache
from dsa_layers.cache.prefix_tree import PrefixTree
from dsa_layers.cache.state_copies import StateCopies
from dsa_layers.generation.running_sequence import RunningSequence
from dsa_layers.generation.sequence_memory import SequenceMemory


class SharedPrefixes(SequenceMemory):
    """The first pages of a sequence are those of an earlier prompt with the same tokens, as far as there are such. Only
    full pages of prompts are shared, and the last token of a prompt is always computed. So whatever a sequence computes
    itself goes to pages behind these.

    A sequence waits while a prompt that is computed comes to pages that both have.

    copies: of what the caches keep by sequence, at the ends of prefixes; None where they keep nothing so. A prefix can
    be had where there is a copy. These are made where the last full page of a prompt ends, and where other prompts,
    earlier ones or ones that wait, have the same pages up to there and no further.

    What a drafter keeps of a position depends on the next token. With drafts that is compared, too.
    """

    def __init__(self, cache: Cache, drafts: int, copies: StateCopies | None = None) -> None:
        super().__init__(cache, drafts)
        self._tree = PrefixTree(cache.allocator, cache.page_size, look_ahead=min(drafts, 1))
        self._copies = copies
        self._refused: RunningSequence | None = None  # and nothing has changed since

    @property
    def free(self) -> int:
        return super().free + self._tree.unused

    def start(self, s: RunningSequence, running: Sequence[RunningSequence]) -> bool:
        if s is self._refused or not self._cache.state_slots.free:
            return False
        found = self._tree.find(s.tokens)
        have = len(found)
        while have and self._copies is not None and found[have - 1] not in self._copies:
            have -= 1
        shared = found[:have]
        count = self.pages(s.limit) - have
        room = self.free - sum(not page.users for page in shared)
        if self._is_computed(s, have, running) or count > room:
            self._refused = s
            return False
        self._tree.use(shared)
        s.shared = shared
        for page in self._tree.make_room(count):
            if self._copies is not None:
                self._copies.forget(page)
        s.pages = [page.page for page in shared] + self._cache.allocator.allocate(count)
        (s.state_slot,) = self._cache.state_slots.allocate(1)
        s.cached = have * self._cache.page_size
        if self._copies is not None:
            s.stops = {n * self._cache.page_size for n in (len(found), self._tree.full_pages(s.prompt_len))}
            if shared:
                self._copies.restore(shared[-1], s.state_slot)
        return True

    def _is_computed(self, s: RunningSequence, have: int, running: Sequence[RunningSequence]) -> bool:
        """Whether more pages of its prompt than it can have by now will be another's soon."""
        for other in running:
            if not other.prefilling:
                continue
            common = self._tree.common(s.tokens, other.tokens)
            end = common * self._cache.page_size
            if common > have and end > other.cached:
                if self._copies is not None:
                    other.stops.add(end)
                return True
        return False

    def look_again(self) -> None:
        self._refused = None

    def next_stop(self, s: RunningSequence) -> int:
        return min((n for n in s.stops if n > s.cached), default=s.prompt_len)

    def computed(self, s: RunningSequence) -> None:
        """Full pages can be shared from now on. Where another sequence has computed the same in the meantime, its page
        takes the place of this one's."""
        self._refused = None
        for i in range(len(s.shared), min(s.cached // self._cache.page_size, self._tree.full_pages(s.prompt_len))):
            own = s.pages[i]
            page = self._tree.add(s.shared, s.tokens, own)
            s.shared.append(page)
            if page.page != own:
                s.pages[i] = page.page
                self._cache.allocator.release([own])
        if self._copies is not None and s.cached in s.stops and s.shared:
            self._copies.keep(s.shared[-1], s.state_slot)

    def release(self, s: RunningSequence) -> None:
        self._refused = None
        shared, s.shared = s.shared, []
        s.pages = s.pages[len(shared) :]
        super().release(s)
        self._tree.release(shared)
