"""The pages of earlier prompts, by their tokens."""

from collections import OrderedDict
from collections.abc import Sequence

from dsa_layers.cache.kv_cache import PageAllocator


class CachedPage:
    """A full page of a prompt. page: its number in the cache. tokens: those on it, and behind it what the tree looks
    ahead. users: sequences that have it. children: pages behind it, by their tokens."""

    __slots__ = ("children", "page", "parent", "tokens", "users")

    def __init__(self, page: int, parent: "CachedPage | None", tokens: tuple[int, ...]) -> None:
        self.page, self.parent, self.tokens = page, parent, tokens
        self.users = 0
        self.children: dict[tuple[int, ...], CachedPage] = {}


class PrefixTree:
    """Pages are found by their tokens and all tokens before them, which are compared one by one.

    Each page has as many users as there are sequences with it. One without users stays until `make_room` takes it: the
    least recently used first, and none before the pages behind it.

    look_ahead: so many tokens behind a page must be the same, too: what is on the page depends on them.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, look_ahead: int = 0) -> None:
        self._allocator, self.page_size, self.look_ahead = allocator, page_size, look_ahead
        self._root = CachedPage(-1, None, ())
        # The least recently used first. Children are before their parents: who has a page has all pages before it, and
        # gives the last of them back first.
        self._unused: OrderedDict[CachedPage, None] = OrderedDict()

    @property
    def unused(self) -> int:
        """Pages that nobody uses."""
        return len(self._unused)

    def find(self, tokens: Sequence[int]) -> list[CachedPage]:
        """The pages of the longest prefix that is there and leaves a token of these over."""
        found: list[CachedPage] = []
        here: CachedPage | None = self._root
        for i in range((len(tokens) - 1) // self.page_size):
            here = here.children.get(tuple(self._tokens(tokens, i)))
            if here is None:
                break
            found.append(here)
        return found

    def common(self, tokens: Sequence[int], others: Sequence[int]) -> int:
        """How many pages of the prompt `others` are those of `tokens`, of which they leave one over."""
        most = min((len(tokens) - 1) // self.page_size, self.full_pages(len(others)))
        return next((i for i in range(most) if self._tokens(tokens, i) != self._tokens(others, i)), most)

    def full_pages(self, tokens: int) -> int:
        """How many pages of a prompt of so many tokens can be added."""
        return max(tokens - self.look_ahead, 0) // self.page_size

    def use(self, pages: Sequence[CachedPage]) -> None:
        """Somebody has these pages, which are the first ones of a prompt."""
        for page in pages:
            if not page.users:
                del self._unused[page]
            page.users += 1

    def release(self, pages: Sequence[CachedPage]) -> None:
        """Somebody has them no longer."""
        for page in reversed(pages):
            page.users -= 1
            if not page.users:
                self._unused[page] = None

    def add(self, before: Sequence[CachedPage], tokens: Sequence[int], page: int) -> CachedPage:
        """The page behind the pages `before` of a prompt of these tokens, with one user more: the one that is there, or
        else `page`, which is the tree's from now on."""
        parent = before[-1] if before else self._root
        own = tuple(self._tokens(tokens, len(before)))
        found = parent.children.get(own)
        if found is not None:
            self.use([found])
            return found
        found = parent.children[own] = CachedPage(page, parent, own)
        found.users = 1
        return found

    def make_room(self, count: int) -> list[CachedPage]:
        """Gives pages that nobody uses to the allocator until `count` are free there; those that it gave."""
        given = []
        while self._allocator.free < count:
            page, _ = self._unused.popitem(last=False)
            del page.parent.children[page.tokens]
            self._allocator.release([page.page])
            given.append(page)
        return given

    def _tokens(self, tokens: Sequence[int], i: int) -> Sequence[int]:
        begin = i * self.page_size
        return tokens[begin : begin + self.page_size + self.look_ahead]
