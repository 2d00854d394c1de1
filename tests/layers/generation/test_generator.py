"""Generation: scheduling, stopping, streaming and failures, on the tiny FP8 checkpoint."""

import dataclasses
import threading

import pytest
import torch

from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.generation.token_stream import TokenStream
from dsa_layers.io.loading import load_model
from dsa_layers.io.tokenizer import Tokenizer

PROMPTS = ["The lightning indexer", "def forward(self, x): return", "a"]


@pytest.fixture(scope="module")
def fp8_model(checkpoint):
    """As published: FP8 weights, activations, index keys and latents, bf16 between them."""
    return load_model(checkpoint, progress=False)


@pytest.fixture(scope="module")
def model(checkpoint):
    """Nothing quantised, in fp32: rounding cannot decide which token is the best one."""
    return load_model(checkpoint, dtype=torch.float32, dequantize=True, progress=False)


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer(checkpoint)


@pytest.fixture(scope="module")
def greedy(model, tokenizer):
    """What each prompt gives alone."""
    generator = Generator(model, tokenizer, cache_tokens=256)
    return [generator.generate([p], SamplingParams(max_tokens=10))[0] for p in PROMPTS]


def test_fp8_checkpoints_run_in_fp8(fp8_model, tokenizer):
    layer = fp8_model.model.layers[1].self_attn
    assert layer.q_b_proj.weight.dtype == torch.float8_e4m3fn and layer.indexer.quantize
    assert fp8_model.make_cache(1).layer(0).latent_is_fp8 and fp8_model.lm_head.weight.dtype == torch.bfloat16
    params = SamplingParams(max_tokens=4)
    first, again = (Generator(fp8_model, tokenizer, cache_tokens=512).generate(PROMPTS, params) for _ in range(2))
    assert [c.tokens for c in first] == [c.tokens for c in again] and all(len(c.tokens) == 4 for c in first)


def test_the_batch_gives_what_each_prompt_gives_alone(model, tokenizer, greedy):
    """More sequences than the cache holds at once, prompts cut into chunks: pages are freed and used again."""
    generator = Generator(model, tokenizer, cache_tokens=64, page_size=16, prefill_chunk=5)
    got = generator.generate(PROMPTS, SamplingParams(max_tokens=10))
    assert [c.tokens for c in got] == [c.tokens for c in greedy]
    assert [c.prompt_tokens for c in got] == [len(tokenizer.encode(p)) for p in PROMPTS]
    assert all(c.finish_reason == "length" and len(c.tokens) == 10 for c in got)
    assert generator.cache.allocator.free == 4
    prefilled = sum(c.prompt_tokens for c in got)
    assert generator.throughput.prefill_tokens == prefilled and generator.throughput.decode_tokens == 3 * 9
    assert f"prefill: {prefilled} tokens" in str(generator.throughput)


def test_a_stream_tells_how_far_prompts_are(model, tokenizer):
    told = []
    generator = Generator(model, tokenizer, cache_tokens=256, prefill_chunk=5)
    events = generator.stream(PROMPTS, SamplingParams(max_tokens=2), on_prefill=lambda *counts: told.append(counts))
    assert len([*events]) == 6
    total = generator.throughput.prefill_tokens
    assert told == [(done, total) for done in range(0, total, 5)]


def test_streamed_text_is_the_text(model, tokenizer, greedy):
    events = list(Generator(model, tokenizer, cache_tokens=256).stream(PROMPTS, SamplingParams(max_tokens=10)))
    for i, completion in enumerate(greedy):
        own = [e for e in events if e.sequence == i]
        assert "".join(e.text for e in own) == completion.text == tokenizer.decode(completion.tokens)
        assert [e.finish_reason for e in own] == [None] * 9 + ["length"]


def test_a_second_stream_is_refused_while_one_is_open(model, tokenizer, greedy):
    """Refused, not broken: it may be asked again once the first has ended."""
    generator = Generator(model, tokenizer, cache_tokens=256)
    params = SamplingParams(max_tokens=10)
    first, second = (generator.stream([prompt], params) for prompt in PROMPTS[:2])
    events = [next(first)]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="another stream of this generator is open and holds the cache"):
            next(second)
        with pytest.raises(RuntimeError, match=r"close it first \(Generator.close_stream\(\)\)"):
            generator.generate(PROMPTS, params)
    events += first
    assert [e.token for e in events] == greedy[0].tokens
    assert [e.token for e in second] == greedy[1].tokens and list(first) == list(second) == []
    assert generator.cache.allocator.free == 4


def test_streams_that_end_early_make_room(model, tokenizer, greedy):
    generator = Generator(model, tokenizer, cache_tokens=256)
    params = SamplingParams(max_tokens=10)

    def works():
        assert generator.cache.allocator.free == 4 and generator.cache.state_slots.free == 4
        return generator.generate([PROMPTS[0]], params)[0].tokens == greedy[0].tokens

    stream = generator.stream(PROMPTS, params)
    next(stream)
    generator.close_stream()
    assert list(stream) == [] and works()
    for _ in generator.stream(PROMPTS, params):
        break  # nothing refers to the stream any more
    assert works()
    unread = generator.stream(PROMPTS, params)
    assert works()  # it has not begun
    unread.close()
    assert list(unread) == []
    generator.close_stream()

    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:  # the traceback refers to the frames
        generator.generate(PROMPTS, params, on_event=stop)
    assert works() and kept.tb is not None


def test_the_cache_is_free_after_the_last_event(model, tokenizer, greedy):
    """Also of a pass that ends several sequences, and before the stream is asked for another event."""
    generator = Generator(model, tokenizer, cache_tokens=256)
    params = SamplingParams(max_tokens=10)
    stream = generator.stream(PROMPTS, params)
    for _ in range(30):
        next(stream)
    assert generator.cache.allocator.free == 4
    assert [c.tokens for c in generator.generate(PROMPTS, params)] == [c.tokens for c in greedy] and list(stream) == []


def test_a_stream_that_begins_refuses_another_before_its_first_event(model, tokenizer, monkeypatch):
    """Another thread asks for the second stream while this one begins the first."""
    generator = Generator(model, tokenizer, cache_tokens=256)
    first, second = (generator.stream([prompt], SamplingParams(max_tokens=2)) for prompt in PROMPTS[:2])
    begin = generator._begin

    def begin_and_lose_the_turn(*arguments):
        begin(*arguments)
        monkeypatch.setattr(generator, "_begin", begin)
        with pytest.raises(RuntimeError, match="another stream of this generator is open"):
            next(second)

    monkeypatch.setattr(generator, "_begin", begin_and_lose_the_turn)
    assert len(list(first)) == 2 and generator._begin == begin
    assert len(list(second)) == 2


def test_closing_a_stream_while_a_pass_is_running(model, tokenizer, greedy, monkeypatch):
    """As another thread does that cancels a request."""
    generator = Generator(model, tokenizer, cache_tokens=256)
    params = SamplingParams(max_tokens=10)
    stream, prefill = generator.stream(PROMPTS, params), generator.engine._cache.passes.prefill

    def close_and_go_on(work):
        generator.close_stream()
        return prefill(work)

    with monkeypatch.context() as patch:
        patch.setattr(generator.engine._cache.passes, "prefill", close_and_go_on)
        assert list(stream) == []
    assert generator.cache.allocator.free == 4
    assert generator.generate([PROMPTS[0]], params)[0].tokens == greedy[0].tokens


def test_a_stream_closed_by_another_thread_closes_its_events_after_the_pass():
    """Events refuse to be closed during the pass, which has ended when `gi_running` is read: the reader closes them."""

    class Events:
        began, may_end = threading.Event(), threading.Event()
        closed, gi_running = 0, False

        def __next__(self):
            self.began.set()
            assert self.may_end.wait(10)
            return "event"

        def close(self):
            if not self.may_end.is_set():
                raise ValueError("generator already executing")
            self.closed += 1

    events, read = Events(), []
    stream = TokenStream(lambda stream: setattr(stream, "_events", events))
    reader = threading.Thread(target=lambda: read.extend(stream))
    reader.start()
    assert events.began.wait(10)
    stream.close()
    events.may_end.set()
    reader.join(10)
    assert read == [] and events.closed == 1


def test_threads_that_read_one_stream_begin_it_once():
    begun, may_end, read = threading.Event(), threading.Event(), []

    def begin(stream):
        assert not begun.is_set()
        begun.set()
        assert may_end.wait(10)
        stream._events = (i for i in range(2))

    stream = TokenStream(begin)
    readers = [threading.Thread(target=lambda: read.append(next(stream))) for _ in range(2)]
    readers[0].start()
    assert begun.wait(10)
    readers[1].start()
    readers[1].join(0.2)  # it would begin the stream again within this time
    may_end.set()
    for reader in readers:
        reader.join(10)
    assert sorted(read) == [0, 1]


def test_closing_a_stream_that_another_thread_ends_meanwhile(model, tokenizer):
    """`_stream` becomes None between two reads."""

    class Ending(Generator):
        reads = 0

        @property
        def _stream(self):
            self.reads += 1
            return (lambda: None) if self.reads == 1 else None

        @_stream.setter
        def _stream(self, stream):
            pass

    generator = Ending(model, tokenizer, cache_tokens=256)
    generator.close_stream()
    assert generator.reads == 1


def test_a_pass_that_asks_for_its_streams_next_event(model, tokenizer, monkeypatch):
    """An error, where it would wait for itself; the stream has ended then, and the next one runs."""
    generator = Generator(model, tokenizer, cache_tokens=256)
    params = SamplingParams(max_tokens=2)
    stream = generator.stream(PROMPTS, params)
    with monkeypatch.context() as patch:
        patch.setattr(generator.engine._cache.passes, "prefill", lambda work: next(stream))
        with pytest.raises(RuntimeError, match="stream: its next event was asked for by the pass that computes it"):
            next(stream)
    assert list(stream) == [] and generator.cache.allocator.free == 4
    assert len(list(generator.stream(PROMPTS, params))) == 6


def test_a_pass_that_fails_gives_everything_back(model, tokenizer, greedy, monkeypatch):
    generator = Generator(model, tokenizer, cache_tokens=256)
    with monkeypatch.context() as patch:
        patch.setattr(generator.engine._cache.passes, "_decode", lambda sequences: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generator.generate(PROMPTS, SamplingParams(max_tokens=10))
    got = generator.generate(PROMPTS, SamplingParams(max_tokens=10))
    assert [c.tokens for c in got] == [c.tokens for c in greedy] and generator.cache.allocator.free == 4


def test_end_of_sequence(model, tokenizer, greedy, monkeypatch):
    generator = Generator(model, tokenizer, cache_tokens=256)
    third = greedy[0].tokens[2]
    monkeypatch.setattr(generator.engine.requests, "eos", {third})
    (got,) = generator.generate([PROMPTS[0]], SamplingParams(max_tokens=10))
    first = greedy[0].tokens.index(third)
    assert got.finish_reason == "eos" and got.tokens == greedy[0].tokens[: first + 1]


def test_stop_string(model, tokenizer, greedy):
    text = greedy[1].text
    stop = text[len(text) // 2 :][:3]
    (got,) = Generator(model, tokenizer, cache_tokens=256).generate(
        [PROMPTS[1]], SamplingParams(max_tokens=10, stop=("never there", stop))
    )
    assert got.finish_reason == "stop" and got.text == text[: text.index(stop)]


def test_the_context_ends_generation(model, tokenizer, monkeypatch):
    monkeypatch.setattr(model, "config", dataclasses.replace(model.config, max_position_embeddings=12))
    (got,) = Generator(model, cache_tokens=64).generate([list(range(10, 20))], SamplingParams(max_tokens=10))
    assert got.finish_reason == "length" and len(got.tokens) == 2
    with pytest.raises(ValueError, match=r"prompts\[0\]: has 12 tokens; the model's context holds 12"):
        Generator(model, cache_tokens=64).generate([list(range(12))])


def test_seeds(model, tokenizer):
    """The same seed gives the same tokens, alone or in a batch; another seed gives others. Of one seed for all prompts
    these have the seeds from that one on; none is too large."""
    generator = Generator(model, tokenizer, cache_tokens=512)
    # Few candidates: between 2048 the batch's last bits decide now and then.
    first, second, third = [SamplingParams(8, temperature=1.0, top_k=8, seed=s) for s in (2**63 - 2, 2**63 - 1, 0)]
    a, b, c = (completion.tokens for completion in generator.generate([PROMPTS[0]] * 3, [first, second, first]))
    (alone,) = generator.generate([PROMPTS[0]], second)
    assert a == c != b == alone.tokens
    of_one_seed = generator.generate([PROMPTS[0]] * 3, first)
    assert of_one_seed == generator.generate([PROMPTS[0]] * 3, [first, second, third])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_ends_its_sequence_alone(model, tokenizer, temperature):
    """The others go on as they would without it, also in pages that held the NaN."""
    token = 77
    # Ids, since the tiny tokenizer follows from the project's text, and the model must not say the token by itself.
    prompts = [[5, 6, 7], [8, token, 9], [20, 21, 22, 23, 24, 25, 26], [token], [10, 11]]
    params = [SamplingParams(12, temperature=temperature, seed=i, top_k=8) for i in range(5)]
    generator = Generator(model, tokenizer, cache_tokens=64, page_size=16, max_sequences=2)
    embeddings = model.model.embed_tokens.weight
    kept = embeddings[token].clone()
    try:
        embeddings.data[token] = torch.nan
        first, second = (generator.generate(prompts, params) for _ in range(2))
        expected = [generator.generate([prompts[i]], params[i])[0] for i in (0, 2, 4)]
    finally:
        embeddings.data[token] = kept
    assert first == second and [first[i] for i in (0, 2, 4)] == expected
    assert all(one.error is None and one.finish_reason != "error" and one.tokens for one in expected)
    for i in (1, 3):
        assert (first[i].tokens, first[i].text, first[i].finish_reason) == ([], "", "error")
        assert first[i].error.startswith(
            f"prompts[{i}]: its logits after {len(prompts[i])} tokens hold NaN or infinity"
        )
    assert generator.cache.allocator.free == 4 and generator.cache.state_slots.free == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_came_before_a_nan_is_kept(model, tokenizer, monkeypatch, temperature):
    params = SamplingParams(8, temperature=temperature, seed=3, top_k=8, stop="never there")
    generator = Generator(model, tokenizer, cache_tokens=512)
    monkeypatch.setattr(
        generator.engine.requests, "eos", set()
    )  # the tiny tokenizer, and so a token, follows from the project's text
    expected = generator.generate(PROMPTS, params)
    decode, calls = generator.engine._cache.passes._decode, []

    def broken(sequences):
        calls.append(len(sequences))
        logits = decode(sequences)
        for row, sequence in enumerate(sequences):
            if sequence.index == 1 and len(sequence.tokens) - sequence.prompt_len == 4:
                logits[row, 5] = torch.nan
        return logits

    monkeypatch.setattr(generator.engine._cache.passes, "_decode", broken)
    events = list(generator.stream(PROMPTS, params))
    ends = {e.sequence: e for e in events if e.finish_reason}
    assert (
        ends[1].token is None and ends[1].finish_reason == "error" and "prompts[1]: its logits after" in ends[1].error
    )
    tokens = [[e.token for e in events if e.sequence == i and e.token is not None] for i in range(3)]
    assert tokens == [expected[0].tokens, expected[1].tokens[:4], expected[2].tokens]
    text = "".join(e.text for e in events if e.sequence == 1)
    assert text == tokenizer.decode(expected[1].tokens[:4])
    assert calls[:4] == [3] * 4 and calls[4:] == [2] * (len(calls) - 4)
