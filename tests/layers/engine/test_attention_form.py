"""Tests of the multi-head and the absorbed form of sparse attention (engine/attention_form.py): choice and results."""

import pytest
import torch

import dsa
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.engine import paged_attention
from dsa_layers.engine.attention_form import HeadSizes, multi_head_is_faster
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.engine.paged_indexer import PagedIndexer
from tests.layers.layers.small_layers import ROTARY

V32 = HeadSizes(128, 128, 64, 128, 512)


@pytest.mark.parametrize(
    ("new", "total", "expected"),
    [
        ([4096], [4096], True),
        ([2100, 500, 100], [2100, 500, 100], True),
        ([16384], [16384], False),
        ([2048], [4096], True),
        ([4096], [32768], False),
        ([1], [2049], False),
        # The keys and values of all heads would take 8 GB, more than EXPANDED_BYTES.
        ([150] * 54, [2300] * 54, False),
    ],
)
def test_short_prompts_and_short_prefixes_take_the_multi_head_form(new, total, expected):
    assert multi_head_is_faster(new, total, 2048, V32) is expected


@pytest.mark.parametrize("pages", [None, torch.float32, "fp8"], ids=str)
@torch.no_grad()
def test_both_forms_give_the_same_result(pages, monkeypatch):
    torch.manual_seed(3)
    full = PagedAttention(128, 4, PagedIndexer(128, 128, n_heads=64, top_k=16), q_lora_rank=128)
    shared = PagedAttention(128, 4, None, q_lora_rank=128)
    chunks = [[50, 9, 33]] if pages is None else [[20, 4, 30], [30, 5, 3]]
    inputs = [torch.randn(sum(new), 128) for new in chunks]
    monkeypatch.setattr(PagedAttention, "_has_multi_head_kernel", lambda *_: True)

    def run(multi_head):
        monkeypatch.setattr(paged_attention, "multi_head_is_faster", lambda *_: multi_head)
        caches, total, out = [None, None], [0, 0, 0], []
        if pages is not None:
            cache = PagedKVCache(2, 8, 16, latent=pages, index="fp8", index_layers=[0])
            caches = [cache.layer(0), cache.layer(1)]
        for new, x in zip(chunks, inputs):
            total = [before + n for before, n in zip(total, new)]
            batch = SequenceBatch.without_cache(new)
            if pages is not None:
                batch = SequenceBatch.paged(new, total, [[0, 3, 7, 1], [2], [4, 5, 6]], 16)
            y, selected = full(x, *ROTARY(batch.positions), batch, caches[0])
            assert (selected.bits is not None) == multi_head
            out += [y, shared(x, *ROTARY(batch.positions), batch, caches[1], selected)[0]]
        return out

    for multi_head, absorbed in zip(run(True), run(False), strict=True):
        assert (multi_head - absorbed).norm() < 1e-5 * absorbed.norm()


@torch.no_grad()
def test_passes_without_a_kernel_take_pytorchs_attention(monkeypatch):
    monkeypatch.setattr(paged_attention, "multi_head_is_faster", lambda *_: True)
    monkeypatch.setattr(dsa, "mha_varlen_fwd", None)  # it has no kernel on a CPU
    layer = PagedAttention(128, 4, PagedIndexer(128, 128, n_heads=64, top_k=4, quantize=False), q_lora_rank=128)
    for lengths in ([9, 5], [3, 4]):
        batch = SequenceBatch.without_cache(lengths)
        layer(torch.randn(sum(lengths), 128), *ROTARY(batch.positions), batch)
