"""Tests of Engine: requests start and end while others run."""

import gc
import random
import threading
from types import SimpleNamespace

import pytest

from dsa_layers.cache.kv_cache import OutOfPages
from dsa_layers.generation.sampling import SamplingParams
from tests.layers.generation.remembering_model import continued, engine_of, is_free


def stream_of(engine, prompt, params):
    return engine.stream(engine.add_request(prompt, params))


def run(engine, tokens=None):
    """Run passes until all requests have ended. Return {sequence: its tokens}, added to `tokens` if it is given."""
    tokens = {} if tokens is None else tokens
    while engine.unfinished:
        for event in engine.step():
            tokens.setdefault(event.sequence, []).append(event.token)
    return tokens


def fail(engine, monkeypatch, name):
    """Make the next call of the method `name` of engine.passes, 'prefill' or 'extend', raise RuntimeError."""

    def fails(*arguments):
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.passes, name, fails)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("options", [{}, {"draft_tokens": 2}, {"prefix_cache": True}], ids=["", "drafts", "prefixes"])
@pytest.mark.parametrize("stateful", [False, True])
def test_requests_that_join_and_leave_at_any_time(stateful, options, seed):
    numbers, engine, found = random.Random(seed), engine_of(stateful=stateful, **options), {}
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
        expected = continued(prompt, count, stateful)
        if request in aborted:
            assert found.get(request, []) == expected[: len(found.get(request, []))]
        else:
            assert found[request] == expected
    assert is_free(engine) and engine.step() == []


def test_prompts_start_while_nothing_can_be_extended():
    """Each request asks for one token, so its prefill ends it. 64 prompts of 6 tokens take 48 chunks of 8."""
    engine, steps = engine_of(prefill_chunk=8), 0
    for _ in range(64):
        engine.add_request([1] * 6, SamplingParams(1))
    while engine.unfinished:
        assert engine.step() or engine.unfinished
        steps += 1
    assert steps == 48


@pytest.mark.parametrize("by_stream", [False, True])
def test_an_aborted_request_has_no_further_events(by_stream):
    engine = engine_of()
    stream = stream_of(engine, [1], SamplingParams(9, temperature=1.0, n=3))
    other = engine.add_request([2], SamplingParams(9))
    next(stream)
    if by_stream:
        stream.close()
    else:
        engine.abort(stream.request)
    assert engine.unfinished == 1 and list(stream) == []
    assert run(engine)[other][-1:] == continued([2], 9)[-1:] and is_free(engine)
    for ended in (stream.request, other, 99, "a request"):
        engine.abort(ended)


def test_requests_that_have_ended_lately_have_streams():
    engine = engine_of(max_sequences=2)
    unfinished = engine.add_request([1], SamplingParams(40))
    requests = [engine.add_request([2], SamplingParams(1)) for _ in range(4)]
    while engine.unfinished > 1:
        engine.step()
    requests.append(engine.add_request([2], SamplingParams(1)))
    for request in requests[:2]:
        with pytest.raises(ValueError, match="request: must be unfinished or have ended lately, got"):
            engine.stream(request)
    for request in requests[2:]:
        assert [event.token for event in engine.stream(request)] == continued([2], 1)
    assert [event.token for event in engine.stream(unfinished)] == continued([1], 40)


def test_a_stream_that_is_dropped_ends_its_request():
    """Each stream is in a reference cycle. The garbage collector may free it while a thread holds the engine's lock."""
    engine = engine_of()
    for i in range(30):
        stream = stream_of(engine, [i % 5, 1], SamplingParams(9))
        if i % 2:
            next(stream)
        cycle = [stream]
        cycle.append(cycle)
        del stream, cycle
        if i % 7 == 0:
            with engine._changed:
                gc.collect()
    gc.collect()
    assert engine.unfinished == 0 and engine.step() == [] and is_free(engine)


def test_threads_share_an_engine():
    engine, found, failed = engine_of(max_sequences=4), {}, []
    prompts = {(i, *range(i % 3)): 3 + i % 4 for i in range(7)}

    def client(prompt, count):
        try:
            for _ in range(5):
                stream = stream_of(engine, [*prompt], SamplingParams(count))
                found.setdefault(prompt, []).append([event.token for event in stream])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=client, args=each) for each in prompts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and not any(thread.is_alive() for thread in threads)
    assert found == {prompt: [continued(prompt, count)] * 5 for prompt, count in prompts.items()} and is_free(engine)


@pytest.mark.parametrize("by_stream", [False, True])
def test_an_abort_by_another_thread_during_a_pass(by_stream):
    """The pass's event for the aborted request is dropped. A call of `step` within the pass is refused."""
    engine = engine_of()
    stream, other = stream_of(engine, [1], SamplingParams(4)), engine.add_request([2], SamplingParams(4))
    engine.step()
    extend = engine.passes.extend

    def abort_and_go_on(ready, counts):
        thread = threading.Thread(target=stream.close if by_stream else lambda: engine.abort(stream.request))
        thread.start()
        thread.join(20)
        with pytest.raises(RuntimeError, match="was called by the pass of another step"):
            engine.step()
        return extend(ready, counts)

    engine.passes.extend = abort_and_go_on
    assert [event.sequence for event in engine.step()] == [other] and list(stream) == []
    engine.passes.extend = extend
    assert run(engine) == {other: continued([2], 4)[2:]} and is_free(engine)


@pytest.mark.parametrize("kind", ["prefill", "extend"])
def test_a_pass_that_raises_ends_the_requests_that_it_computed(kind, monkeypatch, caplog):
    """Only `step` and the streams of the requests that the pass computed raise the error."""
    engine = engine_of(prefill_chunk=3)
    first, second = (stream_of(engine, prompt, SamplingParams(4)) for prompt in ([1, 2], [2] * 6))
    found = [next(first).token]
    fail(engine, monkeypatch, kind)
    if kind == "extend":  # the pass computes the first request's second token
        with pytest.raises(RuntimeError, match="out of memory"):
            next(first)
        assert list(first) == [] and [event.token for event in second] == continued([2] * 6, 4) and not caplog.records
    else:  # the first stream runs the pass, which computes the second request's prompt
        found += [event.token for event in first]
        assert found == continued([1, 2], 4) and "other requests failed" in caplog.text
        with pytest.raises(RuntimeError, match="out of memory"):
            next(second)
        assert list(second) == []
    assert is_free(engine)
    request = engine.add_request([3], SamplingParams(2))
    fail(engine, monkeypatch, "prefill")
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    assert engine.unfinished == 0 and is_free(engine) and run(engine) == {}
    engine.abort(request)


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        ([], SamplingParams(1), ValueError, "prompt: is empty"),
        ([1], [SamplingParams(1)], TypeError, "params: must be SamplingParams, got"),
        ([1] * 60, SamplingParams(30), OutOfPages, "prompt: 60 prompt tokens and 30 new ones need 23 pages"),
    ],
)
def test_requests_that_are_refused(prompt, params, error, message):
    engine = engine_of()
    with pytest.raises(error, match=f"^{message}"):
        engine.add_request(prompt, params)
    assert engine.unfinished == 0 and engine.step() == []
    assert engine.add_request([1], SamplingParams(1)) == 0  # the first number: refused requests get none


class Robbed:
    """A wrapper of an engine's lock. Its first use removes the request's next event, as another reader would."""

    def __init__(self, lock, request):
        self.lock, self.request, self.taken = lock, request, []

    def __enter__(self):
        self.lock.__enter__()
        if not self.taken:
            self.taken.append(self.request.events.popleft().token)

    def __exit__(self, *error):
        return self.lock.__exit__(*error)


def test_a_reader_waits_if_another_reader_takes_the_event():
    engine = engine_of()
    stream = stream_of(engine, [1, 2], SamplingParams(3))
    lock = Robbed(engine._changed, stream._request)
    stream._engine = SimpleNamespace(_alone=engine._alone, _pass=engine._pass, _changed=lock, abort=engine.abort)
    tokens = [event.token for event in stream]
    assert lock.taken + tokens == continued([1, 2], 3)


def test_an_aborted_request_that_waits_holds_up_no_other():
    engine = engine_of(cache_tokens=32)
    long = engine.add_request([1], SamplingParams(20))
    engine.step()
    waits = engine.add_request([2], SamplingParams(24))
    for _ in range(3):
        engine.step()
    short = engine.add_request([3], SamplingParams(1))
    engine.abort(waits)
    sequences = {event.sequence for _ in range(3) for event in engine.step()}
    assert sequences == {long, short}
