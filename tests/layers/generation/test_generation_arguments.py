"""What a generator and the loader of its models refuse before any work, and what they accept."""

import numpy
import pytest
import torch

from dsa_layers.cache.cache import OutOfPages
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from dsa_layers.io.loading import load_model
from dsa_layers.io.tokenizer import Tokenizer
from tests.ops.test_torch_defaults import default_dtype


@pytest.fixture(scope="module")
def model(checkpoint):
    """Nothing quantised, in fp32: rounding cannot decide which token is the best one."""
    return load_model(checkpoint, dtype=torch.float32, dequantize=True, progress=False)


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return Tokenizer(checkpoint)


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ([""], ValueError, r"prompts\[0\]: is empty"),
        ([[5, 10**6]], ValueError, r"prompts\[0\]: token 1000000 is outside the model's vocabulary"),
        (
            [[1] * 300],
            OutOfPages,
            r"prompts\[0\]: 300 prompt tokens and 250 new ones need 9 pages of 64 tokens; the cache",
        ),
        (None, TypeError, "prompts: must be a text, or a list of texts or of lists of token ids, got None"),
        (b"text", TypeError, "prompts: must be a text, or a list of texts or of lists of token ids, got b'text'"),
        ([1, 2], TypeError, r"prompts\[0\]: must be a text or a list of token ids, got 1"),
        ([b"text"], TypeError, r"prompts\[0\]: must be a text or a list of token ids, got b'text'"),
        ([[1, [2]]], TypeError, r"prompts\[0\]\[1\]: must be an integer, got \[2\]"),
        ([[1, True]], TypeError, r"prompts\[0\]\[1\]: must be an integer, got True"),
        ([torch.tensor([True])], TypeError, r"prompts\[0\]\[0\]: must be an integer, got True"),
        ([[5, -1]], ValueError, r"prompts\[0\]: token -1 is outside the model's vocabulary of 2048"),
        ([[10**5000]], ValueError, r"prompts\[0\]: token an integer of 16610 bits is outside"),
        (["a\udcffb"], ValueError, r"prompts\[0\]: is not Unicode text: character 1 is the surrogate U\+DCFF"),
    ],
)
def test_bad_prompts_stop_before_any_work(model, tokenizer, prompts, error, message):
    """`stream` says so before it returns, not at the first event."""
    generator = Generator(model, tokenizer, cache_tokens=256)
    for run in (generator.generate, generator.stream):
        with pytest.raises(error, match=message):
            run(prompts, SamplingParams(max_tokens=250))
    assert generator.cache.allocator.free == 4 and generator.throughput.prefill_tokens == 0


def test_token_ids_may_be_arrays(model):
    generator = Generator(model, cache_tokens=256)
    ids = [[5, 6, 7], [9, 8, 7]]
    params = SamplingParams(max_tokens=3)
    expected = generator.generate(ids, params)
    lists = [tuple(map(tuple, ids)), [torch.tensor(row) for row in ids], torch.tensor(ids)]
    lists += [numpy.array(ids), [list(numpy.array(row, numpy.uint16)) for row in ids]]
    for other in lists:
        assert generator.generate(other, params) == expected
    assert generator.generate([]) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (["text"], None, r"prompts\[0\]: must be token ids for a generator without a tokenizer, got a string"),
        ([[1]], SamplingParams(max_tokens=1, stop=("x",)), "stop strings need a tokenizer"),
        ([[1]], [SamplingParams()] * 2, "params: must be one for all prompts or one for each of 1, got 2"),
    ],
)
def test_text_needs_a_tokenizer(model, prompts, params, message):
    with pytest.raises(ValueError, match=message):
        Generator(model, cache_tokens=64).generate(prompts, params or SamplingParams())


@pytest.mark.parametrize("params", [None, {"temperature": 1}, [None], "greedy"])
def test_params_of_other_types(model, params):
    with pytest.raises(TypeError, match="params: must be SamplingParams, or a list of them, got "):
        Generator(model, cache_tokens=64).stream([[1]], params)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "directory"}, TypeError, "model: must be a model as load_model returns it, got str"),
        ({"tokenizer": "directory"}, TypeError, "tokenizer: must be a dsa_layers.Tokenizer or None, got str"),
        ({"cache_tokens": 0}, ValueError, "cache_tokens: must be at least 1, got 0"),
        ({"cache_tokens": 2**31}, ValueError, "cache_tokens: must be at most 2147483520, got 2147483648"),
        ({"page_size": 2**40}, ValueError, "page_size: must be at most"),
        ({"prefill_chunk": "2048"}, TypeError, "prefill_chunk: must be an integer, got '2048'"),
        ({"page_size": 0}, ValueError, "page_size: must be at least 1, got 0"),
        ({"cuda_graphs": 1}, TypeError, "cuda_graphs: must be True or False, got 1"),
        ({"batch_invariant": True}, ValueError, "batch_invariant: .* a GPU that runs the kernels, got a model on cpu$"),
    ],
)
def test_bad_options_of_a_generator(model, tokenizer, change, error, message):
    with pytest.raises(error, match=message):
        Generator(**{"model": model, "tokenizer": tokenizer, "cache_tokens": 256} | change)


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator:\ncan't allocate memory",
            ValueError,
            r"cache_tokens: a cache of 1000000000 tokens takes [\d.]+ GB, which cannot be al",
        ),
        ("no kernel image is available", RuntimeError, "no kernel image is available"),
    ],
)
def test_a_cache_that_cannot_be_made(model, monkeypatch, raised, error, message):
    make = type(model).make_cache

    def failing(self, pages, page_size, device, *, state_slots):
        if torch.device(device).type != "meta":
            raise RuntimeError(raised)
        return make(self, pages, page_size, device, state_slots=state_slots)

    monkeypatch.setattr(type(model), "make_cache", failing)
    with pytest.raises(error, match=message):
        Generator(model, cache_tokens=10**9)


def test_more_sequences_than_pages_take_no_room(model):
    assert Generator(model, cache_tokens=256, max_sequences=10**18).cache.state_slots.num_pages == 5


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
        ({"device": "cuda:1"}, ValueError, "device: got 'cuda:1', but torch sees no CUDA GPU"),
        ({"device": 0}, TypeError, "device: must be a torch.device, its name or None, got 0"),
        ({"dequantize": "no"}, TypeError, "dequantize: must be True or False, got 'no'"),
    ],
)
def test_bad_options_of_a_model(checkpoint, monkeypatch, options, error, message):
    """Before any weight is read."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("dsa_layers.io.loading.load_weights", None)
    with pytest.raises(error, match=message):
        load_model(checkpoint, progress=False, **options)


def test_more_logprobs_than_tokens(model):
    generator = Generator(model, cache_tokens=64)
    with pytest.raises(ValueError, match="logprobs: must be at most the vocabulary of 2048, got 2049"):
        generator.generate([[5]], SamplingParams(max_tokens=1, logprobs=2049))
    (done,) = generator.generate([[5]], SamplingParams(max_tokens=1, logprobs=2048))
    assert len(done.logprobs[0]) == 2048


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4"])
def test_torchs_default_dtype_and_device_change_nothing(family, tiny_checkpoint):
    """Neither a model's tensors nor its tokens."""
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
