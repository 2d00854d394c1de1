"""Which pages and which state slot a sequence has while it runs."""

from collections.abc import Sequence

from dsa_layers.cache.cache import Cache
from dsa_layers.generation.running_sequence import RunningSequence


class SequenceMemory:
    """Each sequence has pages and a state slot of its own. It gets pages for its prompt, all its new tokens and the
    drafts behind them when it starts, so none is ever evicted.

    drafts: behind each sequence's last token.
    """

    def __init__(self, cache: Cache, drafts: int) -> None:
        self._cache, self._drafts = cache, drafts

    @property
    def free(self) -> int:
        """Pages that a sequence can have."""
        return self._cache.allocator.free

    def pages(self, tokens: int) -> int:
        """The pages of a sequence with this many tokens, with drafts after the last but one."""
        return -(-(tokens + self._drafts) // self._cache.page_size)

    def start(self, s: RunningSequence, running: Sequence[RunningSequence]) -> bool:
        """Gives a sequence that is to run beside others what it needs, or says that it has to wait."""
        count = self.pages(s.limit)
        if not self._cache.state_slots.free or count > self.free:
            return False
        s.pages = self._cache.allocator.allocate(count)
        (s.state_slot,) = self._cache.state_slots.allocate(1)
        return True

    def look_again(self) -> None:
        """Others may have given pages back."""

    def next_stop(self, s: RunningSequence) -> int:
        """How many tokens of its prompt may be in the cache after the next pass."""
        return s.prompt_len

    def computed(self, s: RunningSequence) -> None:
        """A pass has computed more of its prompt."""

    def release(self, s: RunningSequence) -> None:
        """Its pages and its state slot go back, if it has any."""
        pages, state_slot = s.pages, s.state_slot
        s.pages, s.state_slot = [], -1
        self._cache.allocator.release(pages)
        if state_slot >= 0:
            self._cache.state_slots.release([state_slot])
