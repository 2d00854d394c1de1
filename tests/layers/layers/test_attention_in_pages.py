"""Prefills of contexts whose latents would take too much memory attend to FP8 pages, where others read these first."""

import pytest
import torch

import dsa
from dsa_layers.batch.prefill import Chunk, prefill_batch
from dsa_layers.checkpoint.loading import load_model
from dsa_layers.layers import attention
from dsa_layers.layers.own_part import OwnPart

NEW, PAGES = [150, 30], [range(6), range(6, 8)]
FLOAT = {"dtype": torch.float32, "dequantize": True, "progress": False}
FP8_CACHE = FLOAT | {"kv_cache": "fp8"}


def logits(model, monkeypatch, most):
    """Of the second chunks of two prompts, and what was done with pages of latents. most: bytes that may be read, or
    `most_read`."""
    used = []
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(attention, "most_read", most if callable(most) else lambda heads: most)
        read, attend = dsa.read_kv_cache, dsa.flash_mla_with_kvcache

        def reading(pages, *given, **options):
            if pages.shape[-1] >= 576:  # latents, and no index keys
                used.append("read")
            return read(pages, *given, **options)

        patch.setattr(dsa, "read_kv_cache", reading)
        patch.setattr(dsa, "flash_mla_with_kvcache", lambda *given, **o: used.append("attend") or attend(*given, **o))
        cache = model.make_cache(8, state_slots=2)
        for earlier in ([0, 0], NEW):
            chunks = [Chunk(n, before, own, i) for i, (n, before, own) in enumerate(zip(NEW, earlier, PAGES))]
            batch = prefill_batch(chunks, cache.page_size, "cpu")
            found = model(torch.arange(1, 1 + sum(NEW)), batch, cache, all_tokens=True)
    return found, used


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_the_same_attention(family, tiny_checkpoint, monkeypatch):
    """glm_moe_dsa has layers that attend to what others have selected."""
    model = load_model(tiny_checkpoint(family), **FP8_CACHE)
    layers = model.config.num_hidden_layers
    read, how = logits(model, monkeypatch, 10**9)
    in_pages, ways = logits(model, monkeypatch, 0)
    # The first chunks' latents are at hand.
    assert how == layers * ["read"] and ways == 2 * layers * ["attend"]
    assert (read - in_pages).abs().max() < 1e-4 * read.abs().max()


def test_what_is_read_is_counted_in_bytes(tiny_checkpoint, monkeypatch):
    """All keys of 360 tokens, 576 numbers of 4 bytes each."""
    model = load_model(tiny_checkpoint("deepseek_v32"), **FP8_CACHE)
    bytes_ = 2 * sum(NEW) * 576 * 4
    assert "read" in logits(model, monkeypatch, bytes_)[1]
    assert "read" not in logits(model, monkeypatch, bytes_ - 1)[1]


@pytest.mark.parametrize(("heads", "most"), [(1, 384), (16, 384), (17, 192), (64, 192), (128, 192)])
def test_few_heads_read_more(heads, most):
    assert attention.most_read(heads) == most << 20


def test_the_heads_are_those_that_attend(tiny_checkpoint, monkeypatch):
    """Of a process that computes half of them, these."""
    model = load_model(tiny_checkpoint("deepseek_v32"), **FP8_CACHE)
    seen = []
    assert "attend" in logits(model, monkeypatch, lambda heads: seen.append(heads) or 0)[1]
    assert {*seen} == {model.config.num_attention_heads}
    for module in model.modules():
        if isinstance(module, attention.DSAAttention):
            module.own_part = OwnPart(0, 2)
    seen.clear()
    logits(model, monkeypatch, lambda heads: seen.append(heads) or 0)
    assert {*seen} == {model.config.num_attention_heads // 2}


def test_float_pages_are_attended_to_where_they_are(tiny_checkpoint, monkeypatch):
    model = load_model(tiny_checkpoint("deepseek_v32"), **FLOAT)
    assert logits(model, monkeypatch, 0)[1] == logits(model, monkeypatch, 10**9)[1] == []
