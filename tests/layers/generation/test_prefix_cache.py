"""Tests of the prefix cache: how many prompt tokens are computed, and which pages are kept."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsa_layers import Generator, SamplingParams
from dsa_layers.cache.kv_cache import OutOfPages
from tests.layers.generation.remembering_model import VOCABULARY, continued, engine_of, is_free, next_draft

PAGE = 4


def make(**options):
    options = {"cache_tokens": 200, "max_sequences": 64, "prefill_chunk": 100, "prefix_cache": True} | options
    return engine_of(Generator, **options)


def computed(generator, prompts, count=2):
    """Generate and check `count` tokens per prompt. Return the number of prompt tokens that were not reused."""
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
    """The last token of a prompt is always computed. With drafts, a page also depends on the token after it."""
    generator = make(stateful=stateful, draft_tokens=drafts)
    prompt = text(42)
    assert computed(generator, [prompt]) == 42
    assert computed(generator, [prompt]) == 2
    assert computed(generator, [prompt[:40]]) == (4 if not stateful else 40)  # the only copied state is after 40 tokens
    assert computed(generator, [prompt[:40]]) == 4  # the last token must be computed, so the tenth page is not reused
    assert computed(generator, [[*prompt[:40], (prompt[40] + 1) % VOCABULARY]]) == (5 if drafts else 1)
    assert computed(generator, [[*prompt, *text(9, 1)]]) == 11


def test_prompts_of_one_call():
    generator = make()
    common = text(24)
    prompts = [common + text(6, seed) for seed in range(1, 5)]
    assert computed(generator, prompts, 9) == 30 + 3 * 6
    assert generator.model.passes[:4] == [[30], [1], [6, 6, 6], [1, 1, 1, 1]]


def test_states_are_kept_where_prompts_part():
    """Prompts of one call copy the state after their common pages. In later calls, the second prompt does."""
    generator = make(stateful=True)
    common = text(24)
    prompts = [common + text(14, seed) for seed in range(1, 6)]
    assert computed(generator, prompts[:2]) == 38 + 14
    assert computed(generator, [prompts[2]]) == 14
    generator = make(stateful=True)
    assert [computed(generator, [prompt]) for prompt in prompts[:4]] == [38, 38, 14, 14]


def test_no_state_is_kept_within_a_page():
    generator = make(stateful=True, prefill_chunk=5)
    assert computed(generator, [text(14)]) == 14
    assert computed(generator, [text(14)[:6]]) == 6


def test_copies_of_states_are_overwritten_the_oldest_first():
    generator = make(stateful=True, max_sequences=2)
    prompts = [text(9, seed) for seed in range(3)]
    assert [computed(generator, [prompt]) for prompt in prompts] == [9, 9, 9]
    assert [computed(generator, [prompts[i]]) for i in (2, 1, 0, 1)] == [1, 1, 9, 1]
    assert generator.cache.state_slots.free == 2


def test_pages_go_the_least_recently_used_first_and_from_the_end():
    """The cache has six pages. A sequence needs three, and its prompt's two full pages stay cached after its end."""
    generator = make(cache_tokens=6 * PAGE)
    first, second = text(11, 1), text(11, 2)
    assert computed(generator, [first], 1) == 11 and computed(generator, [second], 1) == 11
    assert computed(generator, [first], 1) == 3
    assert computed(generator, [text(9, 3)], 1) == 9  # three pages: two are free, and one of `second` is evicted
    assert computed(generator, [first], 1) == 3
    assert computed(generator, [second], 1) == 7  # its first page is still cached
    with pytest.raises(OutOfPages, match=r"prompts\[0\]: 24 prompt tokens and 1 new ones need 7 pages"):
        generator.generate([text(24)], SamplingParams(max_tokens=1))


def check_drafts(generator):
    """After every pass, check that the first draft of each sequence is `next_draft` of its tokens."""
    passes, model = generator.passes, generator.model

    def checked(run):
        def call(*arguments):
            events = run(*arguments)
            ended = {s for s, event in events if event.finish_reason}
            for s in generator._running:
                if s.drafts and s not in ended:
                    assert s.drafts[0] == next_draft(s.tokens, model.stateful)
            return events

        return call

    passes.prefill, passes.extend = checked(passes.prefill), checked(passes.extend)


PROMPTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=0, max_size=2),  # so few choices that many prompts begin alike
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
    options = {"stateful": stateful, "draft_tokens": drafts, "prefill_chunk": chunk}
    generator = make(cache_tokens=tokens, page_size=size, max_sequences=sequences, **options)
    model = generator.model
    check_drafts(generator)
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
        assert is_free(generator)
