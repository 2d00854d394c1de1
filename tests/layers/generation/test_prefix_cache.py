"""The prefix cache: what is shared, what is computed, who has which page; with a model that remembers its tokens."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsa_layers.cache.kv_cache import OutOfPages
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from tests.layers.generation.remembering_model import (
    RING,
    VOCABULARY,
    RememberingModel,
    entry,
    next_draft,
    next_token,
    sum_of,
)
from tests.layers.generation.test_mixed_passes import continued

PAGE = 4


def make(*, stateful=False, drafts=0, **options):
    model = RememberingModel(stateful=stateful, with_drafter=drafts > 0)
    options = {"cache_tokens": 200, "page_size": PAGE, "prefill_chunk": 100, "prefix_cache": True} | options
    return model, Generator(model, draft_tokens=drafts, **options)


def computed(generator, prompts, count=2):
    """Prompt tokens that were computed; the tokens are the model's."""
    stateful = generator.model.stateful
    got = generator.generate(prompts, SamplingParams(max_tokens=count))
    assert [c.tokens for c in got] == [continued(prompt, count, stateful) for prompt in prompts]
    reused, total = generator.throughput.reused_tokens, sum(map(len, prompts))
    assert generator.throughput.prefill_tokens + reused == total
    return total - reused


def text(length, seed=0):
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("stateful", [False, True])
def test_full_pages_of_earlier_calls(stateful, drafts):
    """The last token is computed in any case, and with drafts the token behind a page is part of what it is of."""
    _, generator = make(stateful=stateful, drafts=drafts)
    prompt = text(42)
    assert computed(generator, [prompt]) == 42
    assert computed(generator, [prompt]) == 2
    assert computed(generator, [prompt[:40]]) == (4 if not stateful else 40)
    assert computed(generator, [prompt[:40]]) == 4  # of 40 tokens the tenth page's last is computed
    assert computed(generator, [[*prompt[:40], (prompt[40] + 1) % VOCABULARY]]) == (5 if drafts else 1)
    assert computed(generator, [[*prompt, *text(9, 1)]]) == 11


def test_prompts_of_one_call():
    """Those that begin with the same pages wait until the first has computed them."""
    model, generator = make()
    common = text(24)
    prompts = [common + text(6, seed) for seed in range(1, 5)]
    assert computed(generator, prompts, 9) == 30 + 3 * 6
    assert model.passes[:4] == [[30], [1], [6, 6, 6], [1, 1, 1, 1]]


def test_states_are_kept_where_prompts_part():
    """A prompt that waits has the state kept at the end of the pages that both have. One that comes after the first
    is done finds none there, and keeps it for the next."""
    _, generator = make(stateful=True)
    common = text(24)
    prompts = [common + text(14, seed) for seed in range(1, 6)]
    assert computed(generator, prompts[:2]) == 38 + 14
    assert computed(generator, [prompts[2]]) == 14
    _, generator = make(stateful=True)
    assert [computed(generator, [prompt]) for prompt in prompts[:4]] == [38, 38, 14, 14]


def test_copies_of_states_are_overwritten_the_oldest_first():
    """There are as many as sequences may run."""
    _, generator = make(stateful=True, max_sequences=2)
    prompts = [text(9, seed) for seed in range(3)]
    assert [computed(generator, [prompt]) for prompt in prompts] == [9, 9, 9]
    assert [computed(generator, [prompts[i]]) for i in (2, 1, 0, 1)] == [1, 1, 9, 1]
    assert generator.cache.state_slots.free == 2


def test_pages_go_the_least_recently_used_first_and_from_the_end():
    """Six pages, of which each sequence needs three, and leaves two."""
    _, generator = make(cache_tokens=6 * PAGE)
    first, second = text(11, 1), text(11, 2)
    assert computed(generator, [first], 1) == 11 and computed(generator, [second], 1) == 11
    assert computed(generator, [first], 1) == 3
    assert computed(generator, [text(9, 3)], 1) == 9  # three pages, of which two are free: one of `second` goes
    assert computed(generator, [first], 1) == 3
    assert computed(generator, [second], 1) == 7  # its first page is there
    with pytest.raises(OutOfPages, match=r"prompts\[0\]: 24 prompt tokens and 1 new ones need 7 pages"):
        generator.generate([text(24)], SamplingParams(max_tokens=1))


def test_pages_that_somebody_else_has():
    """The error names what is free for sequences: pages that nobody has, and those that nobody uses."""
    _, generator = make(cache_tokens=6 * PAGE)
    computed(generator, [text(11)], 1)
    taken = generator.cache.allocator.allocate(3)
    with pytest.raises(OutOfPages, match=r"prompts\[0\]: needs 4 pages, and 3 of the cache's 6 are free"):
        generator.generate([text(15, 1)], SamplingParams(max_tokens=1))
    assert computed(generator, [text(11)], 1) == 3
    generator.cache.allocator.release(taken)


def check_pages(generator, capacity, running=()):
    """Every page has one owner, and the tree's hold what they are of. running: sequences that have begun."""
    tree, copies, cache = generator.engine._cache.memory._tree, generator.engine._cache.memory._copies, generator.cache
    size = cache.page_size
    pages, nodes, users, waiting = [], [], {}, [(tree._root, [])]
    for s in running:
        for node in s.shared:
            users[node] = users.get(node, 0) + 1
        assert s.pages[: len(s.shared)] == [node.page for node in s.shared]
    while waiting:
        node, before = waiting.pop()
        for tokens, child in node.children.items():
            assert tokens == child.tokens and child.parent is node and child.users == users.get(child, 0)
            assert (child in tree._unused) == (child.users == 0)
            own = [*before, *tokens[:size]]
            assert cache.values[child.page].tolist() == own[-size:]
            if generator.engine._options["draft_tokens"]:
                known = [*own, tokens[-1]]
                entries = [
                    entry(next_token(known[: i + 1], generator.model.stateful), known[i + 1]) for i in range(len(own))
                ]
                assert generator.engine._cache.passes.caches[1].values[child.page].tolist() == entries[-size:]
            if copies is not None and child in copies:
                assert cache.states[copies._slots[child], (len(own) - 1) % RING] == sum_of(own)
            pages.append(child.page)
            nodes.append(child)
            waiting.append((child, own))
    if copies is not None:
        assert set(copies._slots) <= set(nodes)
        assert len({*copies._slots.values(), *copies._spare}) == cache.state_slots.num_pages // 2
    private = [page for s in running for page in s.pages[len(s.shared) :]]
    assert len({*pages, *private}) == len(pages) + len(private) == capacity - cache.allocator.free
    assert all(not cache.allocator._free.count(page) for page in (*pages, *private))


class Spy:
    """Looks at every pass: nobody writes to a page that another has, and drafts are those of the tokens alone."""

    def __init__(self, generator, capacity):
        self.generator, self.capacity, self.running = generator, capacity, []
        memory, passes = generator.engine._cache.memory, generator.engine._cache.passes
        start, release, prefill, extend = memory.start, memory.release, passes.prefill, passes.extend

        def start_noted(s, running):
            started = start(s, running)
            if started:
                self.running.append(s)
            return started

        def release_noted(s):
            self.running = [other for other in self.running if other is not s]
            release(s)

        def prefill_checked(work):
            for s, n in work:
                self.writes(s, s.cached, s.cached + n)
            return self.drafted(prefill(work))

        def extend_checked(sequences, throughput):
            for s in sequences:
                self.writes(s, len(s.tokens) - 1, len(s.tokens) + generator.engine._options["draft_tokens"])
            return self.drafted(extend(sequences, throughput))

        memory.start, memory.release = start_noted, release_noted
        passes.prefill, passes.extend = prefill_checked, extend_checked

    def writes(self, s, begin, end):
        check_pages(self.generator, self.capacity, self.running)
        size = self.generator.cache.page_size
        for i in range(begin // size, (end - 1) // size + 1):
            assert i >= len(s.shared)
            assert sum(s.pages[i] in other.pages for other in self.running) == 1

    def drafted(self, events):
        ended = {event.sequence for event in events if event.finish_reason}
        for s in self.running:
            if s.drafts and s.index not in ended:
                assert s.drafts[0] == next_draft(s.tokens, self.generator.model.stateful)
        return events


PROMPTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=0, max_size=2),  # few begin otherwise than others
        st.integers(0, 14),
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
        st.integers(1, 6),
    ),
    min_size=1,
    max_size=6,
)
CALLS = st.lists(st.tuples(PROMPTS, st.one_of(st.none(), st.integers(0, 12)), st.booleans()), min_size=1, max_size=4)
LONG = text(14, 9)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    calls=CALLS,
    stateful=st.booleans(),
    drafts=st.sampled_from([0, 0, 1, 3]),
    chunk=st.integers(1, 30),
    size=st.sampled_from([2, 4, 7]),
    tokens=st.integers(32, 72),
    sequences=st.integers(1, 4),
)
def test_any_calls(calls, stateful, drafts, chunk, size, tokens, sequences):
    """Tokens are the model's, and every page is accounted for before each pass and after each call, also after calls
    that are closed or in which a pass fails."""
    model, generator = make(
        stateful=stateful,
        drafts=drafts,
        cache_tokens=tokens,
        page_size=size,
        prefill_chunk=chunk,
        max_sequences=sequences,
    )
    pages = -(-tokens // size)
    Spy(generator, pages)
    slots = generator.cache.state_slots.free
    for drawn, end, fails in calls:
        prompts = [first + LONG[:n] + rest for first, n, rest, _ in drawn]
        params = [SamplingParams(max_tokens=count) for *_, count in drawn]
        stream = generator.stream(prompts, params)
        found = [[] for _ in prompts]
        model.fail_at = len(model.passes) + 1 + end if end is not None and fails else None
        try:
            for i, event in enumerate(stream):
                if i == end and not fails:
                    break
                found[event.sequence].append(event.token)
            whole = end is None or i < end
        except ZeroDivisionError:
            whole = False
        stream.close()
        for prompt, one, tokens in zip(prompts, params, found):
            expected = continued(prompt, one.max_tokens, stateful)
            assert tokens == (expected if whole and not fails else expected[: len(tokens)])
        check_pages(generator, pages)
        assert generator.cache.state_slots.free == slots == min(sequences, pages)
