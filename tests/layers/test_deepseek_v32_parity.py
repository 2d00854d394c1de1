"""The whole model against transformers' own DeepSeek-V3.2 on a tiny random checkpoint, in fp32.

transformers quantises nothing and always attends naively with a mask, so this holds our absorbed, gathered, paged and
chunked paths against an independent one. Lengths lie beyond index_topk = 8, so that selection matters.
"""

import pytest
import torch

from dsa_layers.generation import Generator
from dsa_layers.models.loading import load_model
from dsa_layers.sampling import SamplingParams
from dsa_layers.sequence_batch import SequenceBatch
from tests.layers import hf_models

TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("v32")
    theirs = hf_models.deepseek_v32(directory)
    return theirs, load_model(directory, dtype=torch.float32, progress=False)


@pytest.fixture(scope="module")
def text(models):
    tokens = torch.randint(0, 256, (3, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return tokens, models[0](tokens).logits


def assert_same(got, expected):
    assert (got - expected).abs().max() < TOLERANCE
    assert expected.std() > 0.3  # else agreement means little


@torch.no_grad()
def test_selection_matters(models, text):
    """What the other tests rest on: without selection the logits would be others."""
    ours = models[1]
    tokens, expected = text
    top_k = [layer.self_attn.indexer.top_k for layer in ours.model.layers]
    for layer in ours.model.layers:
        layer.self_attn.indexer.top_k = 64
    dense = ours(tokens[0], SequenceBatch.without_cache([48]), all_tokens=True)
    for layer, k in zip(ours.model.layers, top_k):
        layer.self_attn.indexer.top_k = k
    assert (dense - expected[0])[8:].abs().max() > 0.05
    assert (dense - expected[0])[:8].abs().max() < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 7, 8, 9, 48])
def test_full_prefill(models, text, length):
    tokens, expected = text
    got = models[1](tokens[0, :length], SequenceBatch.without_cache([length]), all_tokens=True)
    assert_same(got, expected[0, :length])


@torch.no_grad()
def test_batch_of_unequal_lengths(models, text):
    """Packed without padding; transformers runs each alone."""
    tokens, expected = text
    lengths = [48, 5, 23]
    packed = torch.cat([tokens[i, :n] for i, n in enumerate(lengths)])
    got = models[1](packed, SequenceBatch.without_cache(lengths), all_tokens=True)
    assert_same(got, torch.cat([expected[i, :n] for i, n in enumerate(lengths)]))
    last = models[1](packed, SequenceBatch.without_cache(lengths))
    assert_same(last, torch.stack([expected[i, n - 1] for i, n in enumerate(lengths)]))


def paged_run(model, tokens, chunks, page_size=16, pages=(5, 0, 3)):
    """Logits of all tokens, computed chunk by chunk over a paged cache poisoned with NaN."""
    cache = model.make_cache(8, page_size)
    for layer in range(len(model.model.layers)):
        cache.layer(layer).latent.fill_(torch.nan)
        cache.layer(layer).index.fill_(torch.nan)
    out, done = [], 0
    for n in chunks:
        batch = SequenceBatch.paged([n], [done + n], [list(pages)], page_size)
        out.append(model(tokens[done : done + n], batch, cache, all_tokens=True))
        done += n
    return torch.cat(out)


@torch.no_grad()
@pytest.mark.parametrize("chunks", [[1] * 48, [48], [5, 7, 13, 1, 1, 21], [16, 16, 16], [8, 1, 39]])
def test_paged_decode_and_chunked_prefill(models, text, chunks):
    assert_same(paged_run(models[1], text[0][0], chunks), text[1][0])


@torch.no_grad()
def test_paged_batch_decode(models, text):
    """Three sequences of different lengths, each extended by single tokens in one batch, pages interleaved."""
    tokens, expected = text
    ours, lengths, page_size = models[1], [30, 4, 17], 16
    cache = ours.make_cache(12, page_size)
    pages = [[0, 4, 8], [1, 5, 9], [2, 6, 10]]
    packed = torch.cat([tokens[i, :n] for i, n in enumerate(lengths)])
    ours(packed, SequenceBatch.paged(lengths, lengths, pages, page_size), cache)
    for step in range(12):
        after = [n + step + 1 for n in lengths]
        new = torch.stack([tokens[i, n - 1] for i, n in enumerate(after)])
        got = ours(new, SequenceBatch.paged([1] * 3, after, pages, page_size), cache)
        assert_same(got, torch.stack([expected[i, n - 1] for i, n in enumerate(after)]))


def test_greedy_tokens(models, text):
    theirs, ours = models
    prompts = [text[0][0, :20].tolist(), text[0][1, :3].tolist()]
    got = Generator(ours, cache_tokens=256, page_size=16, prefill_chunk=7).generate(
        prompts, SamplingParams(max_new_tokens=24)
    )
    for prompt, completion in zip(prompts, got):
        expected = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False
        )
        assert completion.tokens == expected[0, len(prompt) :].tolist()
        assert len(completion.tokens) == 24


@torch.no_grad()
def test_without_groups_and_yarn(tmp_path):
    """Another config: one routing group, plain rope, two shared experts, all layers sparse."""
    changes = {
        "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "first_k_dense_replace": 0, "num_hidden_layers": 2,
        "routed_scaling_factor": 1.7, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    }  # fmt: skip
    theirs = hf_models.deepseek_v32(tmp_path, **changes)
    ours = load_model(tmp_path, dtype=torch.float32, progress=False)
    tokens = torch.randint(0, 256, (40,))
    got = ours(tokens, SequenceBatch.without_cache([40]), all_tokens=True)
    assert_same(got, theirs(tokens[None]).logits[0])
