"""Tests of arguments that Generator and load_model refuse, and of some that they accept."""

import numpy
import pytest
import torch

from dsa_layers import Generator, SamplingParams, Tokenizer, load_model
from dsa_layers.cache.kv_cache import OutOfPages
from tests.layers.generation.remembering_model import engine_of, is_free
from tests.ops.test_torch_defaults import default_dtype


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, dtype=torch.float32, dequantize=True, progress=False)


TOO_LONG = r"prompts\[0\]: 300 prompt tokens and 250 new ones need 9 pages of 64 tokens with 0 drafts; "


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["a", ""], {}, r"prompts\[1\]: is empty"),
        ([[1] * 300], {}, TOO_LONG),
        (None, {}, "prompts: must be a text, or a list of texts or of lists of token ids, got None"),
        ([[1, [2]]], {}, r"prompts\[0\]\[1\]: must be an integer, got \[2\]"),
        ([torch.tensor([True])], {}, r"prompts\[0\]\[0\]: must be an integer, got True"),
        ([[5, -1]], {}, r"prompts\[0\]: token -1 is outside the model's vocabulary of 2048"),
        (["a\udcffb"], {}, r"prompts\[0\]: is not Unicode text: character 1 is the surrogate U\+DCFF"),
        ([[1]], {"logprobs": 2049}, "logprobs: must be at most the vocabulary of 2048, got 2049"),
        ([[1]], [SamplingParams()] * 2, "params: must be one for all prompts or one for each of 1, got 2"),
    ],
)
def test_wrong_calls_stop_before_any_work(model, checkpoint, prompts, params, message):
    """`stream` raises at the call, not at the first event."""
    generator = Generator(model, Tokenizer(checkpoint), cache_tokens=256)
    if isinstance(params, dict):
        params = SamplingParams(250, **params)
    for run in (generator.generate, generator.stream):
        with pytest.raises((TypeError, ValueError, OutOfPages), match=message):
            run(prompts, params)
    assert is_free(generator) and generator.throughput.prefill_tokens == 0


def test_text_needs_a_tokenizer():
    told = r"prompts\[0\]: must be token ids for a generator without a tokenizer, got a string"
    with pytest.raises(ValueError, match=told):
        engine_of(Generator).generate(["text"])
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        engine_of(Generator).generate([[1]], SamplingParams(1, stop="x"))


def test_token_ids_may_be_arrays():
    generator, ids, params = engine_of(Generator), [[5, 6, 1], [3, 2, 1]], SamplingParams(3, logprobs=7)
    expected = generator.generate(ids, params)
    lists = [tuple(map(tuple, ids)), [torch.tensor(row) for row in ids], torch.tensor(ids)]
    lists += [numpy.array(ids), [list(numpy.array(row, numpy.uint16)) for row in ids]]
    for other in lists:
        assert generator.generate(other, params) == expected
    assert len(expected[0].logprobs[0]) == 7 and generator.generate([]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "directory"}, "model: must be a model as load_model returns it, got str"),
        ({"tokenizer": "directory"}, "tokenizer: must be a dsa_layers.Tokenizer or None, got str"),
        ({"cache_tokens": 2**31}, "cache_tokens: must be at most 2147483520, got 2147483648"),
        ({"prefill_chunk": "2048"}, "prefill_chunk: must be an integer, got '2048'"),
        ({"draft_tokens": 4}, "draft_tokens: must be at most 3, got 4"),
        ({"draft_tokens": 1}, r"draft_tokens: must be 0 for a model without a drafter .*, got 1"),
        ({"batch_invariant": True}, "batch_invariant: .* a GPU that runs the kernels, got a model on cpu$"),
        ({"pages": 3}, "got an unexpected keyword argument 'pages'"),
    ],
)
def test_wrong_options_of_a_generator(model, change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Generator(**{"model": model, "cache_tokens": 256} | change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache": "int4"}, "kv_cache: must be 'fp8' or 'model', got 'int4'"),
        ({"dtype": "bfloat16"}, "dtype: must be torch.bfloat16, torch.float16 or .*, got 'bfloat16'"),
        ({"device": "cpu:1"}, "device: must be cpu, cuda or cuda:N, got 'cpu:1'"),
        ({"device": "cuda:1"}, "device: got 'cuda:1', but torch sees no CUDA GPU"),
        ({"dequantize": "no"}, "dequantize: must be True or False, got 'no'"),
    ],
)
def test_wrong_options_of_a_model_stop_before_any_weight_is_read(checkpoint, monkeypatch, options, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("dsa_layers.io.loading.load_weights", None)
    with pytest.raises((TypeError, ValueError), match=message):
        load_model(checkpoint, progress=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_torchs_default_dtype_and_device_change_nothing(family, tiny_checkpoint):
    directory = tiny_checkpoint(family)
    model = load_model(directory, progress=False)

    def completions(model):
        generator = Generator(model, Tokenizer(directory), cache_tokens=256, prefill_chunk=8)
        found = generator.generate(["The lightning indexer", "a"], SamplingParams(2, repetition_penalty=1.2))
        return [c.tokens for c in found]

    expected = completions(model)
    with torch.device("meta"):
        assert completions(model) == expected
    with default_dtype(torch.bfloat16):
        loaded = load_model(directory, progress=False)
        assert completions(loaded) == expected
    for (name, x), (_, y) in zip(loaded.state_dict().items(), model.state_dict().items(), strict=True):
        assert x.dtype == y.dtype, name
