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
    ],
)
def test_bad_prompts_stop_before_any_work(model, tokenizer, prompts, error, message):
    generator = Generator(model, tokenizer, cache_tokens=256)
    with pytest.raises(error, match=message):
        generator.generate(prompts, SamplingParams(max_new_tokens=250))
    assert generator.cache.allocator.free == 4 and generator.throughput.prefill_tokens == 0


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


def test_greedy_takes_the_lowest_of_equals_and_refuses_nan():
    greedy, stream = SamplingParams(), random_stream(SamplingParams())
    assert sample(torch.tensor([[0.0, 3.0, 3.0], [5.0, 3.0, 3.0]]), [greedy] * 2, [stream] * 2) == [1, 0]
    with pytest.raises(ValueError, match="logits: hold NaN"):
        sample(torch.tensor([[0.0, 1.0], [0.0, torch.nan]]), [greedy] * 2, [stream] * 2)


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
    ],
)
def test_sampling_parameters(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


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
