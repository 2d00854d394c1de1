"""What the parity tests of every family hold: a whole model against transformers' own on a tiny checkpoint, in fp32.

transformers quantises nothing and always attends naively with a mask, so this holds our absorbed, gathered, paged and
chunked paths against an independent one. Lengths lie beyond index_topk = 8, so that selection matters.
"""

import pytest
import torch

from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.checkpoint.loading import load_model
from dsa_layers.generation.generator import Generator
from dsa_layers.generation.sampling import SamplingParams

TOLERANCE = 2e-5


def assert_same(got, expected):
    assert (got - expected).abs().max() < TOLERANCE
    assert expected.std() > 0.3  # else agreement means little


def paged_run(model, tokens, chunks, page_size=16, pages=(5, 0, 3)):
    """Logits of all tokens, computed chunk by chunk over a paged cache poisoned with NaN."""
    cache = model.make_cache(8, page_size)
    for i in range(len(model.model.layers)):
        layer = cache.layer(i)
        for stored in (layer.latent, layer.index):
            if stored is not None:
                stored.view(torch.uint8).fill_(0xFF)
    out, done = [], 0
    for n in chunks:
        batch = SequenceBatch.paged([n], [done + n], [list(pages)], page_size)
        out.append(model(tokens[done : done + n], batch, cache, all_tokens=True))
        done += n
    return torch.cat(out)


class ParityTests:
    """Subclasses have a static method `build(directory)`, which saves transformers' model there and returns it."""

    @pytest.fixture(scope="class")
    @classmethod
    def models(cls, tmp_path_factory):
        directory = tmp_path_factory.mktemp("checkpoint")
        theirs = cls.build(directory)
        return theirs, load_model(directory, dtype=torch.float32, progress=False)

    @pytest.fixture(scope="class")
    @classmethod
    def text(cls, models):
        tokens = torch.randint(0, 256, (3, 48), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return tokens, models[0](tokens).logits

    @torch.no_grad()
    def test_selection_matters(self, models, text):
        """What the other tests rest on: without selection the logits would be others."""
        ours = models[1]
        tokens, expected = text
        indexers = [layer.self_attn.indexer for layer in ours.model.layers if layer.self_attn.indexer is not None]
        for indexer in indexers:
            assert indexer.top_k == 8
            indexer.top_k = 64
        dense = ours(tokens[0], SequenceBatch.without_cache([48]), all_tokens=True)
        for indexer in indexers:
            indexer.top_k = 8
        assert (dense - expected[0])[8:].abs().max() > 0.05
        assert (dense - expected[0])[:8].abs().max() < TOLERANCE

    @torch.no_grad()
    @pytest.mark.parametrize("length", [1, 7, 8, 9, 48])
    def test_full_prefill(self, models, text, length):
        tokens, expected = text
        got = models[1](tokens[0, :length], SequenceBatch.without_cache([length]), all_tokens=True)
        assert_same(got, expected[0, :length])

    @torch.no_grad()
    def test_batch_of_unequal_lengths(self, models, text):
        """Packed without padding; transformers runs each alone."""
        tokens, expected = text
        lengths = [48, 5, 23]
        packed = torch.cat([tokens[i, :n] for i, n in enumerate(lengths)])
        got = models[1](packed, SequenceBatch.without_cache(lengths), all_tokens=True)
        assert_same(got, torch.cat([expected[i, :n] for i, n in enumerate(lengths)]))
        last = models[1](packed, SequenceBatch.without_cache(lengths))
        assert_same(last, torch.stack([expected[i, n - 1] for i, n in enumerate(lengths)]))

    @torch.no_grad()
    @pytest.mark.parametrize("chunks", [[1] * 48, [48], [5, 7, 13, 1, 1, 21], [16, 16, 16], [8, 1, 39]])
    def test_paged_decode_and_chunked_prefill(self, models, text, chunks):
        assert_same(paged_run(models[1], text[0][0], chunks), text[1][0])

    @torch.no_grad()
    def test_paged_batch_decode(self, models, text):
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

    def test_greedy_tokens(self, models, text):
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
