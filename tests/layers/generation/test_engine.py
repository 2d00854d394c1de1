"""An engine whose requests come and go while others run. Each must get the tokens that it gets alone."""

import contextlib
import gc
import random
import threading
import time

import pytest

from dsa_layers.cache.kv_cache import OutOfPages
from dsa_layers.generation.engine import Engine
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from tests.layers.generation.remembering_model import RememberingModel, next_token


def alone(prompt, count, stateful=False):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, stateful))
    return tokens[len(prompt) :]


def engine_of(stateful=False, **options):
    options = {"page_size": 4, "cache_tokens": 64, "max_sequences": 3, "prefill_chunk": 5} | options
    model = RememberingModel(stateful=stateful, with_drafter="draft_tokens" in options)
    return Engine(model, **options)


def is_free(engine):
    memory = engine._cache.memory
    return memory.free == engine._cache.capacity and engine._running == [] == engine._withdrawn and not engine._live


def run(engine, tokens):
    """Step until nothing is unfinished. tokens: {sequence: its tokens so far}"""
    while engine.unfinished:
        for event in engine.step():
            tokens.setdefault(event.sequence, []).append(event.token)
    return tokens


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{}, {"draft_tokens": 2}, {"prefix_cache": True}], ids=["", "drafts", "prefixes"])
@pytest.mark.parametrize("stateful", [False, True])
def test_requests_that_join_and_leave_at_any_time(stateful, options, seed):
    numbers, engine, found = random.Random(seed), engine_of(stateful, **options), {}
    asked, aborted = {}, set()
    for _ in range(60):
        choice = numbers.random()
        if choice < 0.3:
            prompt = [numbers.randrange(3) for _ in range(numbers.randrange(1, 20))]
            count = numbers.randrange(1, 12)
            asked[engine.add_request(prompt, SamplingParams(count))] = prompt, count
        elif choice < 0.4 and asked:
            request = numbers.choice(sorted(asked))
            engine.abort(request)
            aborted.add(request)
        else:
            for event in engine.step():
                assert event.sequence not in aborted
                found.setdefault(event.sequence, []).append(event.token)
    run(engine, found)
    for request, (prompt, count) in asked.items():
        expected = alone(prompt, count, stateful)
        if request in aborted:
            assert found.get(request, []) == expected[: len(found.get(request, []))]
        else:
            assert found[request] == expected
    assert is_free(engine) and engine.step() == []


def test_sequences_of_a_request_have_numbers_of_their_own():
    engine = engine_of()
    first = engine.add_request([1, 2], SamplingParams(3, temperature=0.7, seed=5, n=2))
    second = engine.add_request([4], SamplingParams(2))
    found = run(engine, {})
    assert (first, second) == (0, 2) and {*found} == {0, 1, 2} and found[2] == alone([4], 2)
    generator = Generator(RememberingModel(), page_size=4, cache_tokens=64)
    expected = generator.generate([[1, 2]], [SamplingParams(3, temperature=0.7, seed=5, n=2)])
    assert [found[0], found[1]] == [done.tokens for done in expected]


def test_a_pass_over_prompts_alternates_with_one_that_extends():
    engine, seen = engine_of(prefill_chunk=4), []
    passes = engine._cache.passes
    prefill, extend = passes.prefill, passes.extend
    passes.prefill = lambda work: seen.append(("prompt", [(s.index, n) for s, n in work])) or prefill(work)
    passes.extend = lambda ready, counts: seen.append(("extend", [s.index for s in ready])) or extend(ready, counts)
    engine.add_request([1] * 3, SamplingParams(5))
    engine.step()
    engine.add_request([2] * 6, SamplingParams(2))
    for _ in range(5):
        engine.step()
    assert seen == [
        ("prompt", [(0, 3)]),
        ("extend", [0]),
        ("prompt", [(1, 4)]),
        ("extend", [0]),
        ("prompt", [(1, 2)]),
        ("extend", [0, 1]),
    ]


def test_streams_share_the_passes():
    engine = engine_of()
    prompts = [[1, 2, 3], [4, 5], [6], [1, 1]]
    streams = [engine.stream(engine.add_request(prompt, SamplingParams(6))) for prompt in prompts]
    found = [[next(stream).token] for stream in reversed(streams)][::-1]
    for tokens, stream in zip(found, streams, strict=True):
        tokens += [event.token for event in stream]
    assert found == [alone(prompt, 6) for prompt in prompts] and is_free(engine)
    assert engine.throughput.decode_tokens == 4 * 5


def test_a_stream_that_is_closed_ends_its_request():
    engine = engine_of()
    request, other = (engine.add_request(prompt, SamplingParams(9)) for prompt in ([1], [2]))
    stream = engine.stream(request)
    next(stream)
    stream.close()
    assert engine.unfinished == 1 and list(stream) == []
    assert run(engine, {})[other][-1:] == alone([2], 9)[-1:] and is_free(engine)
    for ended in (request, other, 99, "a request"):
        with pytest.raises(ValueError, match="request: must be unfinished, got"):
            engine.stream(ended)
        engine.abort(ended)


def test_a_request_that_another_ends_ends_its_stream():
    """Events that are computed and not read yet are dropped."""
    engine = engine_of()
    stream = engine.add_stream([1], SamplingParams(9, temperature=1.0, n=3))
    next(stream)
    engine.abort(stream.request)
    assert list(stream) == [] and is_free(engine)


def test_a_request_has_one_stream():
    engine = engine_of()
    stream = engine.add_stream([1], SamplingParams(4))
    with pytest.raises(ValueError, match="request: must be one without a stream, got 0"):
        engine.stream(stream.request)
    assert [event.token for event in stream] == alone([1], 4)


def test_a_stream_that_is_dropped_or_closed_unread_ends_its_request():
    engine = engine_of()
    streams = [engine.add_stream([1], SamplingParams(9)) for _ in range(3)]
    streams[0].close()
    del streams[1]
    assert engine.unfinished == 1 and list(streams[0]) == []
    streams.clear()
    assert engine.unfinished == 0 and engine.step() == [] and not engine._streams and is_free(engine)


def test_streams_that_the_garbage_collector_closes_while_the_engine_is_locked():
    """Each is in a cycle, as a traceback or a task makes one."""
    engine = engine_of()
    for i in range(300):
        stream = engine.add_stream([i % 5, 1], SamplingParams(9))
        next(stream)
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        if i % 7 == 0:
            with engine._changed:
                gc.collect()
    gc.collect()
    assert engine.unfinished == 0 and is_free(engine)


def test_a_stream_that_another_thread_closes():
    engine = engine_of()
    stream, extend = engine.add_stream([1], SamplingParams(9)), engine._cache.passes.extend
    next(stream)

    def close_and_go_on(ready, counts):
        thread = threading.Thread(target=stream.close)
        thread.start()
        thread.join(20)
        return extend(ready, counts)

    engine._cache.passes.extend = close_and_go_on
    assert list(stream) == [] and is_free(engine)


def test_threads_share_an_engine():
    engine, found, failed = engine_of(max_sequences=4), {}, []
    prompts = {(i, *range(i % 3)): 3 + i % 4 for i in range(7)}

    def client(prompt, count):
        try:
            for _ in range(5):
                stream = engine.add_stream([*prompt], SamplingParams(count))
                found.setdefault(prompt, []).append([event.token for event in stream])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=client, args=each) for each in prompts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads)
    assert found == {prompt: [alone(prompt, count)] * 5 for prompt, count in prompts.items()} and is_free(engine)


def test_a_stream_does_not_wait_for_its_turn_if_others_compute_its_events():
    """A reader waits to run a pass, while another thread runs one after another without a pause."""
    engine = engine_of()
    stream, extend, one_pass = engine.add_stream([1], SamplingParams(3)), engine._cache.passes.extend, engine._one_pass
    next(stream)
    engine.add_request([2], SamplingParams(50))
    found, thread = [], threading.Thread(target=lambda: found.append(next(stream).token))

    def read_meanwhile(ready, counts):
        thread.start()
        time.sleep(0.05)  # the reader waits for the end of this pass
        return extend(ready, counts)

    @contextlib.contextmanager
    def without_a_pause(wanted=None):
        """The events are there, and the turn of this thread does not end."""
        with one_pass(wanted) as mine:
            yield mine
            if mine:
                with engine._changed:
                    engine._changed.notify_all()
                thread.join(5)

    engine._cache.passes.extend, engine._one_pass = read_meanwhile, without_a_pause
    engine.step()
    assert not thread.is_alive() and found == alone([1], 2)[1:]
    engine._cache.passes.extend, engine._one_pass = extend, one_pass
    stream.close()
    run(engine, {})
    assert is_free(engine)


def test_an_abort_during_a_pass():
    """Another thread, or a hook, ends the request. The pass's event is dropped."""
    engine = engine_of()
    request, other = (engine.add_request(prompt, SamplingParams(4)) for prompt in ([1], [2]))
    engine.step()
    passes = engine._cache.passes
    extend = passes.extend

    def abort_and_go_on(ready, counts):
        engine.abort(request)
        with pytest.raises(RuntimeError, match="was called by the pass of another step"):
            engine.step()
        return extend(ready, counts)

    passes.extend = abort_and_go_on
    assert [event.sequence for event in engine.step()] == [other]
    passes.extend = extend
    assert run(engine, {}) == {other: alone([2], 4)[2:]} and is_free(engine)


@pytest.mark.parametrize("function", ["prefill", "extend"])
def test_a_pass_that_raises_ends_the_requests_that_it_computed(function, monkeypatch, caplog):
    """`step` raises the error, and so do their streams. Streams of others that run the pass go on."""
    engine = engine_of(prefill_chunk=3)
    passes = engine._cache.passes
    first, second = engine.add_stream([1, 2], SamplingParams(4)), engine.add_stream([2] * 6, SamplingParams(4))
    found = [next(first).token]
    error = RuntimeError("out of memory")

    def fails(*arguments):
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(passes, function, fails)
    if function == "extend":  # the first request's second token
        with pytest.raises(RuntimeError, match="out of memory"):
            next(first)
        assert list(first) == [] and [event.token for event in second] == alone([2] * 6, 4) and not caplog.records
    else:  # the second request's prompt, in a pass that the first stream runs
        found += [event.token for event in first]
        assert found == alone([1, 2], 4) and "other requests failed" in caplog.text
        with pytest.raises(RuntimeError, match="out of memory"):
            next(second)
        assert list(second) == []
    assert is_free(engine)
    request = engine.add_request([3], SamplingParams(2))
    monkeypatch.setattr(passes, "prefill", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert engine.unfinished == 0 and is_free(engine) and run(engine, {}) == {}
    engine.abort(request)


def test_all_sequences_of_a_request_end_with_it(monkeypatch):
    """The second sequence's prompt is not computed yet when the first one's fails."""
    engine = engine_of(prefill_chunk=2)
    stream = engine.add_stream([1, 2], SamplingParams(4, temperature=1.0, n=2))
    other = engine.add_request([3], SamplingParams(2))

    def fails(work):
        assert len(work) == 1
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._cache.passes, "prefill", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        next(stream)
    assert list(stream) == [] and engine.unfinished == 1
    assert run(engine, {}) == {other: alone([3], 2)} and is_free(engine)


def test_a_cache_that_cannot_grow_ends_the_request_that_needs_it(monkeypatch):
    engine = engine_of(cache_tokens=None, max_sequences=2)
    engine._cache._allocate(8)
    large, small = engine.add_stream([2] * 60, SamplingParams(3)), engine.add_stream([1], SamplingParams(3))

    def fails(tokens):
        if tokens > 32:
            raise ValueError("cache_tokens: cannot be allocated")

    monkeypatch.setattr(engine._cache, "grow", fails)
    assert [event.token for event in small] == alone([1], 3)
    with pytest.raises(ValueError, match="cannot be allocated"):
        next(large)
    assert list(large) == [] and is_free(engine)


def test_a_prefix_cache_sees_that_others_have_given_pages_back():
    engine = engine_of(prefix_cache=True)
    taken = engine.cache.allocator.allocate(14)
    engine.add_request([1] * 9, SamplingParams(3))
    with pytest.raises(OutOfPages):
        engine.step()
    request = engine.add_request([1] * 9, SamplingParams(3))
    engine.cache.allocator.release(taken)
    assert run(engine, {}) == {request: alone([1] * 9, 3)}


def test_prompts_start_while_nothing_can_be_extended():
    """All requests end with their prompts' passes: none of these waits for a pass that extends."""
    engine, steps = engine_of(prefill_chunk=8), 0
    for _ in range(64):
        engine.add_request([1] * 6, SamplingParams(1))
    while engine.unfinished:
        assert engine.step() or engine.unfinished
        steps += 1
    assert steps == 48


def test_a_cpus_cache_grows_once_nothing_runs():
    engine = engine_of(cache_tokens=None, max_sequences=2)
    engine._cache._allocate(8)
    short, long = ([1] * 5, 4), ([2] * 60, 3)
    first = engine.add_request(short[0], SamplingParams(short[1]))
    engine.step()
    second = engine.add_request(long[0], SamplingParams(long[1]))
    assert engine._cache.capacity == 8
    found = run(engine, {first: alone(*short)[:1]})
    assert found == {first: alone(*short), second: alone(*long)} and engine._cache.capacity == 16


def test_pages_that_others_have_taken():
    engine = engine_of()
    engine.cache.allocator.allocate(14)
    request = engine.add_request([1] * 9, SamplingParams(3))
    with pytest.raises(OutOfPages, match="request 0: needs 3 pages, and 2 of the cache's 16 are free"):
        engine.step()
    assert engine.unfinished == 0 and engine.step() == []
    engine.abort(request)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], SamplingParams(1), ValueError, "prompt: is empty"),
        ([1, 99], SamplingParams(1), ValueError, "prompt: token 99 is outside the model's vocabulary of 7"),
        ("text", SamplingParams(1), ValueError, "prompt: must be token ids for a generator without a tokenizer"),
        (3, SamplingParams(1), TypeError, "prompt: must be a text or a list of token ids, got 3"),
        ([1], [SamplingParams(1)], TypeError, "params: must be SamplingParams, got"),
        ([1], SamplingParams(1, stop="a"), ValueError, "params: stop strings need a tokenizer"),
        ([1] * 60, SamplingParams(30), OutOfPages, "prompt: 60 prompt tokens and 30 new ones need 23 pages"),
    ],
)
def test_requests_that_are_refused(prompt, params, error, message):
    engine = engine_of()
    with pytest.raises(error, match=f"^{message}"):
        engine.add_request(prompt, params)
    assert engine.unfinished == 0 and engine.step() == []
    assert engine.add_request([1], SamplingParams(1)) == 0  # a refused one has no number


def test_graphs_are_captured_while_nothing_runs():
    engine = engine_of()
    engine.warm_up()
    engine.add_request([1], SamplingParams(2))
    with pytest.raises(RuntimeError, match="warm_up: must be called while no request runs, got 1 unfinished"):
        engine.warm_up()


def test_unknown_options():
    for kind in (Engine, Generator):
        with pytest.raises(TypeError, match="pages: unknown options; accepted are cache_tokens, page_size,"):
            kind(RememberingModel(), pages=3)
