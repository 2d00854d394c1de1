"""`PagedWindowAttention` over prompts in chunks gives the plain layer's results."""

import pytest
import torch

from dsa_layers.batch import views
from dsa_layers.batch.sequence_batch import Chunk, SequenceBatch, prefill_batch
from dsa_layers.io.loading import load_model
from tests.layers.models.parity import poisoned_cache

LENS = [250, 1, 97, 130]
OPTIONS = {"dtype": torch.float32, "dequantize": True, "progress": False}
PAGES = [range(5), range(5, 6), range(6, 9), range(9, 12)]


@pytest.fixture(scope="module")
def model(tiny_checkpoint):
    return load_model(tiny_checkpoint("dots3_note"), **OPTIONS)


@pytest.fixture(scope="module")
def plain(tiny_checkpoint):
    return load_model(tiny_checkpoint("dots3_note"), trainable=True, **OPTIONS)


def logits(model, ends):
    """Return the logits of all tokens, sorted by prompt. Each pass continues the prompts up to a number in `ends`."""
    cache, done = poisoned_cache(model, 12, model.page_size), [0] * len(LENS)
    tokens, found = [torch.arange(n) * 7 % 2000 for n in LENS], [[] for _ in LENS]
    for end in ends:
        rows = [i for i, n in enumerate(LENS) if done[i] < min(end, n)]
        chunks = [Chunk(min(end, LENS[i]) - done[i], done[i], PAGES[i], i) for i in rows]
        batch = prefill_batch(chunks, cache.page_size, "cpu")
        inputs = torch.cat([tokens[i][done[i] : done[i] + chunk.new] for i, chunk in zip(rows, chunks)])
        out = model(inputs, batch, cache, all_tokens=True).split([chunk.new for chunk in chunks])
        for i, own in zip(rows, out):
            found[i].append(own)
            done[i] += len(own)
    return torch.cat([torch.cat(own) for own in found])


@torch.inference_mode()
@pytest.mark.parametrize("tokens", [64, 1024])
@pytest.mark.parametrize("ends", [[250], [100, 101, 200, 250]])  # 100 to 101: decoding
def test_chunks_in_blocks_give_the_plain_model_s_logits(ends, tokens, model, plain, monkeypatch):
    monkeypatch.setattr(views, "BLOCK_TOKENS", tokens)
    inputs = torch.cat([torch.arange(n) * 7 % 2000 for n in LENS])
    expected = plain(inputs, SequenceBatch.without_cache(LENS), all_tokens=True)
    assert (logits(model, ends) - expected).abs().max() < 2e-5 * expected.abs().max()
