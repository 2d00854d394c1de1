"""Generation: scheduling, stopping, streaming, sampling and errors, on the tiny FP8 checkpoint."""

import pytest
import torch

from dsa.testing import calc_diff
from dsa_layers.generation import Generator
from dsa_layers.kv_cache import OutOfPages
from dsa_layers.models.loading import load_model
from dsa_layers.sampling import SamplingParams, random_stream, sample
from dsa_layers.sequence_batch import SequenceBatch
from dsa_layers.stop_strings import StopStrings
from dsa_layers.tokenizer import Tokenizer

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
    return [generator.generate([p], SamplingParams(max_new_tokens=10))[0] for p in PROMPTS]


def test_fp8_checkpoints_run_in_fp8(fp8_model, tokenizer):
    layer = fp8_model.model.layers[1].self_attn
    assert layer.q_b_proj.weight.dtype == torch.float8_e4m3fn and layer.indexer.quantize
    assert fp8_model.make_cache(1).layer(0).latent_is_fp8 and fp8_model.lm_head.weight.dtype == torch.bfloat16
    params = SamplingParams(max_new_tokens=4)
    first, again = (Generator(fp8_model, tokenizer, cache_tokens=512).generate(PROMPTS, params) for _ in range(2))
    assert [c.tokens for c in first] == [c.tokens for c in again] and all(len(c.tokens) == 4 for c in first)


def test_fp8_logits_are_near_the_unquantised_ones(model, fp8_model):
    tokens = torch.arange(100, 140)
    with torch.inference_mode():
        pair = [m(tokens, SequenceBatch.without_cache([len(tokens)]), all_tokens=True) for m in (model, fp8_model)]
    assert 1e-6 < calc_diff(*pair) < 0.1  # rounding also moves a random router's choice here and there


def test_the_batch_gives_what_each_prompt_gives_alone(model, tokenizer, greedy):
    """More sequences than the cache holds at once, prompts cut into chunks: pages are freed and used again."""
    generator = Generator(model, tokenizer, cache_tokens=64, page_size=16, prefill_chunk=5)
    got = generator.generate(PROMPTS, SamplingParams(max_new_tokens=10))
    assert [c.tokens for c in got] == [c.tokens for c in greedy]
    assert [c.prompt_tokens for c in got] == [len(tokenizer.encode(p)) for p in PROMPTS]
    assert all(c.finish_reason == "length" and len(c.tokens) == 10 for c in got)
    assert generator.cache.allocator.free == 4
    prefilled = sum(c.prompt_tokens for c in got)
    assert generator.throughput.prefill_tokens == prefilled and generator.throughput.decode_tokens == 3 * 9
    assert f"prefill: {prefilled} tokens" in str(generator.throughput)


def test_streamed_text_is_the_text(model, tokenizer, greedy):
    events = list(Generator(model, tokenizer, cache_tokens=256).stream(PROMPTS, SamplingParams(max_new_tokens=10)))
    for i, completion in enumerate(greedy):
        own = [e for e in events if e.sequence == i]
        assert "".join(e.text for e in own) == completion.text == tokenizer.decode(completion.tokens)
        assert [e.finish_reason for e in own] == [None] * 9 + ["length"]


def test_an_abandoned_stream_gives_its_pages_back(model, tokenizer):
    generator = Generator(model, tokenizer, cache_tokens=256)
    stream = generator.stream(PROMPTS, SamplingParams(max_new_tokens=10))
    next(stream)
    assert generator.cache.allocator.free < 4
    stream.close()
    assert generator.cache.allocator.free == 4


def test_a_second_stream_is_refused_while_one_is_open(model, tokenizer, greedy):
    """Refused, not broken: it may be asked again once the first has ended."""
    generator = Generator(model, tokenizer, cache_tokens=256)
    params = SamplingParams(max_new_tokens=10)
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
    params = SamplingParams(max_new_tokens=10)

    def works():
        assert generator.cache.allocator.free == 4 and generator.cache.lanes.free == 4
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


def test_a_pass_that_fails_gives_everything_back(model, tokenizer, greedy, monkeypatch):
    generator = Generator(model, tokenizer, cache_tokens=256)
    with monkeypatch.context() as patch:
        patch.setattr(generator, "_decode", lambda sequences: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generator.generate(PROMPTS, SamplingParams(max_new_tokens=10))
    got = generator.generate(PROMPTS, SamplingParams(max_new_tokens=10))
    assert [c.tokens for c in got] == [c.tokens for c in greedy] and generator.cache.allocator.free == 4


def test_pages_that_somebody_else_has(model, tokenizer):
    generator = Generator(model, tokenizer, cache_tokens=256)
    pages = generator.cache.allocator.allocate(4)
    with pytest.raises(OutOfPages, match=r"prompts\[0\]: needs 1 pages, and 0 of the cache's 4 are free"):
        generator.generate(PROMPTS, SamplingParams(max_new_tokens=2))
    generator.cache.allocator.release(pages)
    assert len(generator.generate(PROMPTS, SamplingParams(max_new_tokens=2))) == 3


def test_releasing_a_sequence_again_changes_nothing(model, tokenizer):
    generator = Generator(model, tokenizer, cache_tokens=256)
    stream = generator.stream(PROMPTS, SamplingParams(max_new_tokens=10))
    next(stream)
    sequence = stream._sequences[0]
    generator._release(sequence)
    free = generator.cache.allocator.free, generator.cache.lanes.free
    generator._release(sequence)
    assert (generator.cache.allocator.free, generator.cache.lanes.free) == free
    stream.close()
    assert generator.cache.allocator.free == 4


def test_end_of_sequence(model, tokenizer, greedy, monkeypatch):
    generator = Generator(model, tokenizer, cache_tokens=256)
    third = greedy[0].tokens[2]
    monkeypatch.setattr(generator, "_eos", {third})
    (got,) = generator.generate([PROMPTS[0]], SamplingParams(max_new_tokens=10))
    first = greedy[0].tokens.index(third)
    assert got.finish_reason == "eos" and got.tokens == greedy[0].tokens[: first + 1]


def test_stop_string(model, tokenizer, greedy):
    text = greedy[1].text
    stop = text[len(text) // 2 :][:3]
    (got,) = Generator(model, tokenizer, cache_tokens=256).generate(
        [PROMPTS[1]], SamplingParams(max_new_tokens=10, stop=("never there", stop))
    )
    assert got.finish_reason == "stop" and got.text == text[: text.index(stop)]


def test_the_context_ends_generation(model, tokenizer, monkeypatch):
    import dataclasses

    monkeypatch.setattr(model, "config", dataclasses.replace(model.config, max_position_embeddings=12))
    (got,) = Generator(model, cache_tokens=64).generate([list(range(10, 20))], SamplingParams(max_new_tokens=10))
    assert got.finish_reason == "length" and len(got.tokens) == 2
    with pytest.raises(ValueError, match=r"prompts\[0\]: has 12 tokens; the model's context holds 12"):
        Generator(model, cache_tokens=64).generate([list(range(12))])


def test_seeds(model, tokenizer):
    """The same seed gives the same tokens, alone or in a batch; another seed gives others."""
    generator = Generator(model, tokenizer, cache_tokens=512)
    # Few candidates: between 2048 the batch's last bits decide now and then.
    params = [SamplingParams(8, temperature=1.0, top_k=8, seed=s) for s in (1, 2, 1)]
    a, b, c = generator.generate([PROMPTS[0]] * 3, params)
    (alone,) = generator.generate([PROMPTS[0]], params[1])
    assert a.tokens == c.tokens != b.tokens == alone.tokens


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([""], ValueError, r"prompts\[0\]: is empty"),
        ([[1], []], ValueError, r"prompts\[1\]: is empty"),
        ([[5, 10**6]], ValueError, r"prompts\[0\]: token 1000000 is outside the model's vocabulary"),
        (
            [[1] * 300],
            OutOfPages,
            r"prompts\[0\]: 300 prompt tokens and 250 new ones need 9 pages of 64 tokens; the cache",
        ),
        ("text", TypeError, "prompts: must be a list of prompts, got one string"),
        (None, TypeError, "prompts: must be a list of texts or of lists of token ids, got None"),
        (b"text", TypeError, "prompts: must be a list of texts or of lists of token ids, got b'text'"),
        ({"a": [1]}, TypeError, "prompts: must be a list of texts or of lists"),
        ([1, 2], TypeError, r"prompts\[0\]: must be a text or a list of token ids, got 1"),
        (["a", None], TypeError, r"prompts\[1\]: must be a text or a list of token ids, got None"),
        ([b"text"], TypeError, r"prompts\[0\]: must be a text or a list of token ids, got b'text'"),
        ([[1, [2]]], TypeError, r"prompts\[0\]\[1\]: must be an integer, got \[2\]"),
        ([[1, True]], TypeError, r"prompts\[0\]\[1\]: must be an integer, got True"),
        ([[1], [2.0]], TypeError, r"prompts\[1\]\[0\]: must be an integer, got 2.0"),
        ([["1"]], TypeError, r"prompts\[0\]\[0\]: must be an integer, got '1'"),
        ([[1, None]], TypeError, r"prompts\[0\]\[1\]: must be an integer, got None"),
        ([torch.tensor([0.5])], TypeError, r"prompts\[0\]\[0\]: must be an integer, got 0.5"),
        ([torch.tensor([True])], TypeError, r"prompts\[0\]\[0\]: must be an integer, got True"),
        ([torch.tensor(5)], TypeError, r"prompts\[0\]: must be a text or a list of token ids"),
        ([[5, -1]], ValueError, r"prompts\[0\]: token -1 is outside the model's vocabulary of 2048"),
        ([[2048]], ValueError, r"prompts\[0\]: token 2048 is outside"),
        ([[10**5000]], ValueError, r"prompts\[0\]: token an integer of 16610 bits is outside"),
        (["a\udcffb"], ValueError, r"prompts\[0\]: is not Unicode text: character 1 is the surrogate U\+DCFF"),
    ],
)
def test_bad_prompts_stop_before_any_work(model, tokenizer, prompts, error, message):
    """`stream` says so before it returns, not at the first event."""
    generator = Generator(model, tokenizer, cache_tokens=256)
    for run in (generator.generate, generator.stream):
        with pytest.raises(error, match=message):
            run(prompts, SamplingParams(max_new_tokens=250))
    assert generator.cache.allocator.free == 4 and generator.throughput.prefill_tokens == 0


def test_token_ids_may_be_arrays(model):
    import numpy

    generator = Generator(model, cache_tokens=256)
    ids = [[5, 6, 7], [9, 8, 7]]
    params = SamplingParams(max_new_tokens=3)
    expected = generator.generate(ids, params)
    lists = [tuple(map(tuple, ids)), [torch.tensor(row) for row in ids], torch.tensor(ids)]
    lists += [numpy.array(ids), [list(numpy.array(row, numpy.uint16)) for row in ids]]
    for other in lists:
        assert generator.generate(other, params) == expected
    assert generator.generate([]) == []


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "directory"}, TypeError, "model: must be a model as load_model returns it, got str"),
        ({"tokenizer": "directory"}, TypeError, "tokenizer: must be a dsa_layers.Tokenizer or None, got str"),
        ({"cache_tokens": 0}, ValueError, "cache_tokens: must be at least 1, got 0"),
        ({"cache_tokens": 2.5}, TypeError, "cache_tokens: must be an integer, got 2.5"),
        ({"cache_tokens": 2**31}, ValueError, "cache_tokens: must be at most 2147483520, got 2147483648"),
        ({"cache_tokens": 10**30}, ValueError, "cache_tokens: must be at most 2147483520, got 1000"),
        ({"page_size": True}, TypeError, "page_size: must be an integer, got True"),
        ({"page_size": 2**40}, ValueError, "page_size: must be at most"),
        ({"max_sequences": -1}, ValueError, "max_sequences: must be at least 1, got -1"),
        ({"prefill_chunk": "2048"}, TypeError, "prefill_chunk: must be an integer, got '2048'"),
        ({"cuda_graphs": 1}, TypeError, "cuda_graphs: must be True or False, got 1"),
    ],
)
def test_bad_options_of_a_generator(model, tokenizer, change, error, message):
    with pytest.raises(error, match=message):
        Generator(**{"model": model, "tokenizer": tokenizer, "cache_tokens": 256} | change)


def test_a_cache_that_the_device_has_not_room_for(model, monkeypatch):
    make = type(model).make_cache

    def full(self, pages, page_size, device, *, lanes):
        if torch.device(device).type != "meta":
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator:\ncan't allocate memory")
        return make(self, pages, page_size, device, lanes=lanes)

    monkeypatch.setattr(type(model), "make_cache", full)
    with pytest.raises(
        ValueError, match=r"cache_tokens: a cache of 1000000000 tokens takes [\d.]+ GB, which cannot be al"
    ):
        Generator(model, cache_tokens=10**9)


def test_more_sequences_than_pages_take_no_room(model):
    assert Generator(model, cache_tokens=256, max_sequences=10**18).cache.lanes.num_pages == 5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kv_cache": "int4"}, ValueError, "kv_cache: must be 'fp8' or 'model', got 'int4'"),
        ({"kv_cache": ["fp8"]}, ValueError, "kv_cache: must be 'fp8' or 'model', got .'fp8'."),
        ({"dtype": "bfloat16"}, TypeError, "dtype: must be torch.bfloat16, torch.float16 or .*, got 'bfloat16'"),
        ({"dtype": torch.int8}, ValueError, "dtype: must be torch.bfloat16, .*, got torch.int8"),
        ({"dtype": 0}, TypeError, "dtype: must be torch.bfloat16, .*, got 0"),
        ({"device": "tpu"}, ValueError, "device: must be cpu, cuda or cuda:N, got 'tpu'"),
        ({"device": "cpu:1"}, ValueError, "device: must be cpu, cuda or cuda:N, got 'cpu:1'"),
        ({"device": "cuda"}, ValueError, "device: got 'cuda', but torch sees no CUDA GPU"),
        ({"device": None}, TypeError, "device: must be a torch.device or its name, got None"),
        ({"dequantize": "no"}, TypeError, "dequantize: must be True or False, got 'no'"),
    ],
)
def test_bad_options_of_a_model(checkpoint, monkeypatch, options, error, message):
    """Before any weight is read."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("dsa_layers.models.loading.load_weights", None)
    with pytest.raises(error, match=message):
        load_model(checkpoint, progress=False, **options)


def test_a_gpu_that_is_not_there(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"device: got 'cuda:1', but torch sees 1 GPU$"):
        load_model(checkpoint, device="cuda:1")


def test_text_needs_a_tokenizer(model):
    generator = Generator(model, cache_tokens=64)
    with pytest.raises(
        ValueError, match=r"prompts\[0\]: must be token ids for a generator without a tokenizer, got a string"
    ):
        generator.generate(["text"])
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        generator.generate([[1]], SamplingParams(max_new_tokens=1, stop=("x",)))
    with pytest.raises(ValueError, match="params: must be one for all prompts or one for each of 1, got 2"):
        generator.generate([[1]], [SamplingParams()] * 2)
    with pytest.raises(ValueError, match="page_size: must be at least 1, got 0"):
        Generator(model, page_size=0)


def draw(logits, n=4000, **params):
    params = SamplingParams(seed=0, **params)
    stream = random_stream(params)
    drawn = sample(logits.expand(n, -1), [params] * n, [stream] * n)
    return torch.bincount(torch.tensor(drawn), minlength=len(logits)) / n


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    torch.testing.assert_close(draw(logits, temperature=0.7), (logits / 0.7).softmax(0), atol=0.03, rtol=0)
    kept = draw(logits, temperature=1.0, top_k=2)
    torch.testing.assert_close(kept, torch.cat((logits[:2].softmax(0), torch.zeros(2))), atol=0.03, rtol=0)
    # softmax: 0.64, 0.24, 0.09, 0.03. The first reaches 0.6 alone, the first two reach 0.65.
    assert draw(logits, 200, temperature=1.0, top_p=0.6).tolist() == [1, 0, 0, 0]
    assert (draw(logits, 500, temperature=1.0, top_p=0.65) > 0).tolist() == [True, True, False, False]
    assert draw(logits, 50, temperature=1e-30).tolist() == [1, 0, 0, 0]


def test_greedy_takes_the_lowest_of_equals():
    greedy, stream = SamplingParams(), random_stream(SamplingParams())
    assert sample(torch.tensor([[0.0, 3.0, 3.0], [5.0, 3.0, 3.0]]), [greedy] * 2, [stream] * 2) == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_that_are_not_finite_have_no_token(temperature):
    """And the others the one that they have alone. Single tokens may be ruled out by minus infinity."""
    inf, nan = torch.inf, torch.nan
    bad = torch.tensor([[0.0, nan, 1.0], [inf, 0.0, 1.0], [-inf, -inf, -inf], [inf, nan, -inf]])
    good = torch.tensor([[0.0, -inf, 0.5], [-inf, -inf, -1e30], [3.0, 3.0, 3.0]])
    params = [SamplingParams(temperature=temperature, seed=i) for i in range(7)]
    rows = torch.stack([bad[0], good[0], bad[1], good[1], bad[2], good[2], bad[3]])
    got = sample(rows, params, [random_stream(one) for one in params])
    assert got[::2] == [None] * 4 and got[3] == 2
    assert got[1::2] == sample(good, params[1::2], [random_stream(one) for one in params[1::2]])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_ends_its_sequence_alone(model, tokenizer, temperature):
    """The others go on as they would without it, also in pages that held the NaN."""
    token = 77
    prompts = [[5, 6, 7], [8, token, 9], tokenizer.encode(PROMPTS[0]), [token], [10, 11]]
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
    assert generator.cache.allocator.free == 4 and generator.cache.lanes.free == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_came_before_a_nan_is_kept(model, tokenizer, monkeypatch, temperature):
    params = SamplingParams(8, temperature=temperature, seed=3, top_k=8, stop="never there")
    generator = Generator(model, tokenizer, cache_tokens=512)
    expected = generator.generate(PROMPTS, params)
    decode, calls = generator._decode, []

    def broken(sequences):
        calls.append(len(sequences))
        logits = decode(sequences)
        for row, sequence in enumerate(sequences):
            if sequence.index == 1 and len(sequence.tokens) - sequence.prompt_len == 4:
                logits[row, 5] = torch.nan
        return logits

    monkeypatch.setattr(generator, "_decode", broken)
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


def test_rows_are_sampled_each_by_its_own_parameters():
    """A row draws what it draws alone."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=1.0 * (i % 2), top_k=20, seed=i) for i in range(6)]
    together = sample(logits, params, [random_stream(one) for one in params])
    alone = [sample(row[None], [one], [random_stream(one)])[0] for row, one in zip(logits, params)]
    assert together == alone and together[0] == logits[0].argmax()
    assert together != logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: must be at least 1, got 0"),
        ({"temperature": -1.0}, "temperature: must be a finite number of at least 0, got -1.0"),
        ({"temperature": float("nan")}, "temperature: must be a finite"),
        ({"top_k": -1}, "top_k: must be at least 0"),
        ({"top_p": 0.0}, "top_p: must be above 0 and at most 1, got 0.0"),
        ({"seed": -1}, r"seed: must be at least 0 and below 2\^63, got -1"),
        ({"stop": ("",)}, "stop: strings must not be empty"),
        ({"stop": ""}, "stop: strings must not be empty"),
        ({"temperature": 10**400}, "temperature: must be a finite number of at least 0, got inf"),
        ({"top_p": float("nan")}, "top_p: must be above 0 and at most 1, got nan"),
        ({"seed": 2**63}, r"seed: must be at least 0 and below 2\^63, got 9223372036854775808"),
    ],
)
def test_sampling_parameters(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_new_tokens": 2.0}, "max_new_tokens: must be an integer, got 2.0"),
        ({"max_new_tokens": True}, "max_new_tokens: must be an integer, got True"),
        ({"max_new_tokens": None}, "max_new_tokens: must be an integer, got None"),
        ({"temperature": "hot"}, "temperature: must be a number, got 'hot'"),
        ({"temperature": None}, "temperature: must be a number, got None"),
        ({"temperature": True}, "temperature: must be a number, got True"),
        ({"top_k": 1.5}, "top_k: must be an integer, got 1.5"),
        ({"top_p": [0.9]}, r"top_p: must be a number, got \[0.9\]"),
        ({"seed": "1"}, "seed: must be an integer, got '1'"),
        ({"stop": 5}, "stop: must be a string or a list of strings, got 5"),
        ({"stop": b"abc"}, "stop: must be a string or a list of strings, got b'abc'"),
        ({"stop": ("a", None)}, r"stop\[1\]: must be a string, got None"),
    ],
)
def test_sampling_parameters_of_other_types(params, message):
    with pytest.raises(TypeError, match=message):
        SamplingParams(**params)


def test_one_stop_string_is_not_its_letters():
    assert SamplingParams(stop="abc") == SamplingParams(stop=("abc",)) == SamplingParams(stop=["abc"])
    assert SamplingParams(stop="abc").stop == ("abc",) and SamplingParams(stop=None).stop == ()


def test_numbers_of_numpy_and_very_large_ones():
    import numpy

    params = SamplingParams(numpy.int32(4), numpy.float32(0.5), numpy.int64(3), 1, numpy.uint8(7))
    assert params == SamplingParams(4, 0.5, 3, 1.0, 7) and type(params.max_new_tokens) is int
    huge = SamplingParams(10**30, temperature=1e300, top_k=10**30, seed=0)
    assert sample(torch.tensor([[1.0, 2.0]]), [huge], [random_stream(huge)])[0] in (0, 1)


@pytest.mark.parametrize("params", [None, {"temperature": 1}, [None], "greedy"])
def test_params_of_other_types(model, params):
    with pytest.raises(TypeError, match="params: must be SamplingParams, or a list of them, got "):
        Generator(model, cache_tokens=64).stream([[1]], params)


class Letters:
    """A decoder whose tokens are the letters themselves."""

    def push(self, token):
        return token

    def flush(self):
        return ""


@pytest.mark.parametrize(
    ("text", "stop", "shown", "stopped"),
    [
        ("abcabd", ("abd",), ["", "", "abc", "", "", ""], True),
        ("abab", ("abac",), ["", "", "", "abab"], False),
        ("xaab", ("ab", "aabb"), ["x", "", "", "a"], True),
    ],
)
def test_stop_strings_hold_back_what_may_become_one(text, stop, shown, stopped):
    watch = StopStrings(Letters(), stop)
    got = [watch.push(letter, last=i == len(text) - 1) for i, letter in enumerate(text)]
    assert [t for t, _ in got] == shown and got[-1][1] == stopped
