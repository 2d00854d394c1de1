"""Base class of the parity tests: our model and transformers' model of the same tiny checkpoint, in fp32. The longest
sequences have more keys than an indexer selects."""

import re
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch

from dsa_layers import Generator, SamplingParams, SequenceBatch, load_model

TOLERANCE = 2e-5


def assert_same(got, expected):
    assert (got - expected).abs().max() < TOLERANCE
    assert expected.std() > 0.3  # else agreement means little


def poisoned_cache(model, pages, page_size=16):
    cache = model.make_cache(pages, page_size, state_slots=4)
    for tensor in cache.tensors():
        tensor.view(torch.uint8).fill_(0xFF)
    return cache


def paged_run(model, tokens, chunks, page_size=16):
    """Return the logits of all tokens, from a pass per entry of `chunks` over a cache that was filled with NaNs."""
    cache, out, done = poisoned_cache(model, 8, page_size), [], 0
    for n in chunks:
        batch = SequenceBatch.paged([n], [done + n], [[5, 0, 3]], page_size, state_slots=[2])
        out.append(model(tokens[done : done + n], batch, cache, all_tokens=True))
        done += n
    return torch.cat(out)


def layers_with(part, model):
    """Return the numbers of the model's layers that have tensors of `part`."""
    return {int(re.search(r"layers\.(\d+)\.", name)[1]) for name in model.state_dict() if f".{part}." in name}


class ParityTests:
    build: Callable  # static method that saves transformers' model to a directory and returns it
    indexed: ClassVar = {0, 1, 2}  # layers with an indexer
    page_size = 16
    lengths: ClassVar = [1, 7, 8, 9, 48]  # tokens per sequence; the last is the largest
    chunks: ClassVar = [[1] * 48, [5, 7, 13, 1, 1, 21], [16, 16, 16]]

    @pytest.fixture(scope="class")
    @classmethod
    def models(cls, tmp_path_factory):
        directory = tmp_path_factory.mktemp("checkpoint")
        theirs = cls.build(directory)
        return theirs, load_model(directory, dtype=torch.float32, progress=False)

    @pytest.fixture(scope="class")
    @classmethod
    def text(cls, models):
        tokens = torch.randint(0, 256, (3, cls.lengths[-1]), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return tokens, models[0](tokens).logits

    def test_no_other_layers_have_an_indexer(self, models):
        assert layers_with("indexer", models[1]) == self.indexed

    @torch.no_grad()
    def test_packed_prompts_have_the_same_logits(self, models, text):
        tokens, expected = text
        lengths = [*self.lengths, 23]
        packed = torch.cat([tokens[i % 3, :n] for i, n in enumerate(lengths)])
        got = models[1](packed, SequenceBatch.without_cache(lengths), all_tokens=True)
        assert_same(got, torch.cat([expected[i % 3, :n] for i, n in enumerate(lengths)]))
        last = models[1](packed, SequenceBatch.without_cache(lengths))
        assert_same(last, torch.stack([expected[i % 3, n - 1] for i, n in enumerate(lengths)]))

    @torch.no_grad()
    def test_chunks_and_single_tokens_over_pages_have_the_same_logits(self, models, text):
        for chunks in self.chunks:
            assert_same(paged_run(models[1], text[0][0], chunks, self.page_size), text[1][0])

    @torch.no_grad()
    def test_a_batch_over_pages_has_the_same_logits(self, models, text):
        tokens, expected = text
        ours, total = models[1], [0, 0, 0]
        cache = poisoned_cache(ours, 12, self.page_size)
        pages, state_slots = [[0, 4, 8], [1, 5, 9], [2, 6, 10]], [3, 0, 1]
        for new in ([11, 1, 16], [19, 3, 1], *[[1, 1, 1]] * 18):
            parts = [slice(done, done + n) for done, n in zip(total, new)]
            total = [part.stop for part in parts]
            batch = SequenceBatch.paged(new, total, pages, self.page_size, state_slots=state_slots)
            got = ours(torch.cat([tokens[i, part] for i, part in enumerate(parts)]), batch, cache, all_tokens=True)
            assert_same(got, torch.cat([expected[i, part] for i, part in enumerate(parts)]))

    def test_greedy_tokens_are_the_same(self, models, text):
        """At most two of the three prompts run at a time, so the third starts after another has ended."""
        theirs, ours = models
        prompts = [text[0][i, :n].tolist() for i, n in ((0, 20), (1, 3), (2, 41))]
        generator = Generator(ours, cache_tokens=256, page_size=self.page_size, max_sequences=2, prefill_chunk=7)
        for prompt, completion in zip(prompts, generator.generate(prompts, SamplingParams(max_tokens=24))):
            given = {"attention_mask": torch.ones(1, len(prompt)), "max_new_tokens": 24, "do_sample": False}
            expected = theirs.generate(torch.tensor([prompt]), **given)
            assert completion.tokens == expected[0, len(prompt) :].tolist() and len(completion.tokens) == 24
