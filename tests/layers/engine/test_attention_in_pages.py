"""Sparse prefills read FP8 pages if all latents in the model's dtype would take more than a limit of bytes."""

import pytest
import torch

from dsa_layers.batch.sequence_batch import Chunk, prefill_batch
from dsa_layers.engine import paged_attention
from dsa_layers.io.loading import load_model
from tests.layers.layers.calls import record

NEW, PAGES = [150, 30], [range(6), range(6, 8)]
FLOAT = {"dtype": torch.float32, "dequantize": True, "progress": False}


def logits(model, monkeypatch, most):
    """Return (logits of two prompts' second chunks, number of conversions of latent pages, calls of the op that reads
    FP8 pages). most: the limit on the bytes of converted latents."""
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(paged_attention, "most_read", lambda heads: most)
        of_latents = record(patch, "read_kv_cache", seen=lambda pages, *_, **__: pages.shape[-1] >= 576)
        attended = record(patch, "flash_mla_with_kvcache")
        cache = model.make_cache(8, state_slots=2)
        for earlier in ([0, 0], NEW):
            chunks = [Chunk(n, before, own, i) for i, (n, before, own) in enumerate(zip(NEW, earlier, PAGES))]
            batch = prefill_batch(chunks, cache.page_size, "cpu")
            found = model(torch.arange(1, 1 + sum(NEW)), batch, cache, all_tokens=True)
    return found, sum(of_latents), len(attended)


def test_attention_in_pages_is_attention_to_what_is_read_from_them(tiny_checkpoint, monkeypatch):
    model = load_model(tiny_checkpoint("glm_moe_dsa"), **FLOAT, kv_cache="fp8")
    layers = model.config.num_hidden_layers
    expected, *used = logits(model, monkeypatch, 10**9)
    assert used == [layers, 0]  # only the second pass reads latents from pages
    in_pages, *used = logits(model, monkeypatch, 0)
    assert used == [0, 2 * layers]
    assert (expected - in_pages).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize(
    ("kv_cache", "most", "reads", "in_pages"),
    [("fp8", 2 * sum(NEW) * 576 * 4, 2, 0), ("fp8", 2 * sum(NEW) * 576 * 4 - 1, 0, 2), ("model", 0, 0, 0)],
    ids=["all keys fit", "a byte less", "pages of the model's dtype"],
)
def test_the_limit_counts_the_bytes_of_all_keys(kv_cache, most, reads, in_pages, tiny_checkpoint, monkeypatch):
    model = load_model(tiny_checkpoint("deepseek_v32"), **FLOAT, kv_cache=kv_cache)
    del model.model.layers[2:]
    assert logits(model, monkeypatch, most)[1:] == (reads, in_pages)
