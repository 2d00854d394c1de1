"""The whole model against transformers' own DeepSeek-V4 on a tiny random checkpoint, in fp32.

transformers attends naively with masks over all keys, so this holds our windows, rings, entries, their state and their
selection against an independent one. Every kind of layer is there; windows are of 8 tokens, entries of 4 and 16.
"""

import pytest
import torch

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.checkpoint.loading import load_model
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams
from tests.layers.families import hf_models

TOLERANCE = 2e-5
PAGE = 32


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("v4")
    theirs = hf_models.deepseek_v4(directory)
    return theirs, load_model(directory, dtype=torch.float32, progress=False)


@pytest.fixture(scope="module")
def text(models):
    tokens = torch.randint(0, 256, (3, 70), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return tokens, models[0](tokens).logits


def assert_same(got, expected):
    assert (got - expected).abs().max() < TOLERANCE
    assert expected.std() > 0.3  # else agreement means little


@torch.no_grad()
def test_every_part_matters(models, text):
    """What the other tests rest on: without one of these the logits would be others."""
    ours = models[1]
    tokens, expected = text

    def changes(module, name, value):
        kept = getattr(module, name)
        setattr(module, name, value)
        got = ours(tokens[0], SequenceBatch.without_cache([70]), all_tokens=True)
        setattr(module, name, kept)
        return (got - expected[0]).abs().max() > 0.01

    csa, hca = ours.layers[1].attn, ours.layers[2].attn
    assert changes(csa.indexer, "top_k", 64)
    assert changes(csa, "compressor", None) and changes(hca, "compressor", None)
    assert changes(hca, "window", 16)
    assert changes(csa, "attn_sink", torch.nn.Parameter(torch.zeros_like(csa.attn_sink)))
    assert changes(ours.layers[2].ffn.experts, "limit", None) or changes(
        ours.layers[2].ffn.shared_experts, "limit", None
    )
    assert changes(ours.layers[2].hc_attn, "iterations", 1)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 15, 16, 17, 33, 70])
def test_full_prefill(models, text, length):
    tokens, expected = text
    got = models[1](tokens[0, :length], SequenceBatch.without_cache([length]), all_tokens=True)
    assert_same(got, expected[0, :length])


@torch.no_grad()
def test_batch_of_unequal_lengths(models, text):
    tokens, expected = text
    lengths = [70, 5, 3, 33]
    rows = [0, 1, 1, 2]
    packed = torch.cat([tokens[i, :n] for i, n in zip(rows, lengths)])
    got = models[1](packed, SequenceBatch.without_cache(lengths), all_tokens=True)
    assert_same(got, torch.cat([expected[i, :n] for i, n in zip(rows, lengths)]))
    last = models[1](packed, SequenceBatch.without_cache(lengths))
    assert_same(last, torch.stack([expected[i, n - 1] for i, n in zip(rows, lengths)]))


def poisoned_cache(model, pages, state_slots=4):
    """Whatever nobody has written is NaN."""
    cache = model.make_cache(pages, PAGE, state_slots=state_slots)
    for i in range(len(model.layers)):
        layer = cache.layer(i)
        parts = [part for part in (layer.entries, layer.index_entries) if part is not None]
        for tensor in (layer.window, *(t for part in parts for t in (part.pages, part.state))):
            tensor.fill_(torch.nan)
    return cache


def paged_run(model, tokens, chunks, pages=(5, 0, 3), state_slot=2):
    """Logits of all tokens, computed chunk by chunk."""
    cache, out, done = poisoned_cache(model, 8), [], 0
    for n in chunks:
        batch = SequenceBatch.paged([n], [done + n], [list(pages)], PAGE, state_slots=[state_slot])
        out.append(model(tokens[done : done + n], batch, cache, all_tokens=True))
        done += n
    return torch.cat(out)


@torch.no_grad()
@pytest.mark.parametrize(
    "chunks", [[1] * 70, [70], [5, 7, 13, 1, 1, 21, 22], [16] * 4 + [6], [8, 1, 61], [3, 2, 12, 30, 1, 1, 1, 20]]
)
def test_paged_decode_and_chunked_prefill(models, text, chunks):
    assert_same(paged_run(models[1], text[0][0], chunks), text[1][0])


@torch.no_grad()
def test_paged_batch(models, text):
    """Three sequences of different lengths in chunks of different sizes, then single tokens in one batch."""
    tokens, expected = text
    ours, lengths = models[1], [30, 4, 17]
    cache = poisoned_cache(ours, 12)
    pages, state_slots = [[0, 4, 8], [1, 5, 9], [2, 6, 10]], [3, 0, 1]
    for done, new in (([0, 0, 0], [11, 1, 16]), ([11, 1, 16], [19, 3, 1])):
        after = [a + b for a, b in zip(done, new)]
        packed = torch.cat([tokens[i, a:b] for i, (a, b) in enumerate(zip(done, after))])
        got = ours(
            packed, SequenceBatch.paged(new, after, pages, PAGE, state_slots=state_slots), cache, all_tokens=True
        )
        assert_same(got, torch.cat([expected[i, a:b] for i, (a, b) in enumerate(zip(done, after))]))
    for step in range(30):
        after = [n + step + 1 for n in lengths]
        new = torch.stack([tokens[i, n - 1] for i, n in enumerate(after)])
        got = ours(new, SequenceBatch.paged([1] * 3, after, pages, PAGE, state_slots=state_slots), cache)
        assert_same(got, torch.stack([expected[i, n - 1] for i, n in enumerate(after)]))


def test_greedy_tokens(models, text):
    """More sequences than state slots: each takes over a state slot that another has left."""
    theirs, ours = models
    prompts = [text[0][i, :n].tolist() for i, n in ((0, 20), (1, 3), (2, 41), (1, 17))]
    generator = Generator(ours, cache_tokens=256, page_size=PAGE, max_sequences=2, prefill_chunk=7)
    got = generator.generate(prompts, SamplingParams(max_new_tokens=24))
    for prompt, completion in zip(prompts, got):
        expected = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False
        )
        assert completion.tokens == expected[0, len(prompt) :].tolist()
        assert len(completion.tokens) == 24
    assert generator.cache.state_slots.free == 2


@torch.no_grad()
def test_another_schedule_of_layers(tmp_path):
    """Only windows and heavy compression, plain rope, every layer's experts routed, two streams."""
    changes = {
        "compress_ratios": [128, 0, 128], "num_hidden_layers": 3, "num_hash_layers": 0, "hc_mult": 2,
        "rope_parameters": {"rope_type": "default"}, "compress_rope_theta": 5e4, "routed_scaling_factor": 0.7,
    }  # fmt: skip
    theirs = hf_models.deepseek_v4(tmp_path, **changes)
    ours = load_model(tmp_path, dtype=torch.float32, progress=False)
    tokens = torch.randint(0, 256, (40,))
    got = ours(tokens, SequenceBatch.without_cache([40]), all_tokens=True)
    assert_same(got, theirs(tokens[None]).logits[0])
