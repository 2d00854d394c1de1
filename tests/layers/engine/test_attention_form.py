"""Which form attention over selected keys takes. Both forms give the same result."""

import itertools
from dataclasses import replace

import pytest
import torch

import dsa
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.engine import attention_form, paged_attention
from dsa_layers.engine.attention_form import Communication, HeadSizes, multi_head_is_faster
from dsa_layers.engine.paged_attention import PagedAttention
from dsa_layers.engine.paged_indexer import PagedIndexer
from tests.layers.layers.small_layers import ROTARY

V32, GLM5 = HeadSizes(128, 128, 64, 128, 512), HeadSizes(64, 192, 64, 256, 512)


def test_keys_are_counted_as_tokens_see_them():
    for new, total, top_k in itertools.product((0, 1, 3, 7), (7, 10, 30), (1, 5, 8, 40)):
        seen = range(total - new + 1, total + 1)
        assert attention_form.visible_keys(new, total) == sum(seen)
        assert attention_form._beyond(new, total, top_k) == sum(max(n - top_k, 0) for n in seen)


@pytest.mark.parametrize(
    ("new", "total", "expected"),
    [
        ([4096], [4096], True),
        ([3000] * 4, [3000] * 4, True),
        ([2100, 500, 100], [2100, 500, 100], True),
        ([16384], [16384], False),
        ([65536], [65536], False),
        # Chunks of a longer sequence.
        ([2048], [4096], True),
        ([4096], [32768], False),
        ([8192], [131072], False),
        ([16], [8192], False),
        ([1], [2049], False),
    ],
)
def test_short_prompts_and_short_prefixes_take_the_multi_head_form(new, total, expected):
    assert multi_head_is_faster(new, total, 2048, V32) is expected


def test_many_prefixes_are_not_expanded(monkeypatch):
    """Many sequences have a few new tokens each. The keys and values of all heads would take 8 GB."""
    lengths = [150] * 54, [2300] * 54, 2048, V32
    assert not multi_head_is_faster(*lengths)
    monkeypatch.setattr(attention_form, "EXPANDED_BYTES", 16 << 30)
    assert multi_head_is_faster(*lengths)


@pytest.mark.parametrize("sizes", [V32, GLM5])
def test_the_multi_head_form_is_for_prompts_up_to_one_length(sizes):
    forms = [multi_head_is_faster([n], [n], 2048, sizes) for n in range(2049, 40000, 500)]
    assert forms[0] and not forms[-1] and forms == sorted(forms, reverse=True)


def test_communication_takes_latency_per_collective_and_time_per_byte_from_others():
    """20 us per collective, and 0.21 MB per us: 3 of 4 processes send three quarters of 280 tokens of 1000 bytes."""
    assert Communication(4, 1000, 2).microseconds(280) == pytest.approx(2 * 20 + 1)
    assert Communication(2, 1000, 1).microseconds(420) == pytest.approx(20 + 1)


@pytest.mark.parametrize(
    ("sizes", "result", "latents", "processes", "lengths"),
    [
        (V32, 7168, 1584, 4, [3000, 4096, 5800]),
        (V32, 7168, 1584, 8, []),
        (GLM5, 6144, 2112, 2, [3000, 4096]),
        (GLM5, 6144, 2112, 8, []),
    ],
)
def test_the_form_that_communicates_more_is_for_fewer_prompts(sizes, result, latents, processes, lengths):
    """Processes share the computation, but the multi-head form exchanges more bytes per token: the result, the queries'
    latents in FP8, and 2048 selected keys."""
    share = replace(sizes, heads=sizes.heads // processes)
    communication = Communication(processes, 2 * result + latents + 4 * 2048, 3)
    chosen = []
    for n in (2100, 3000, 4096, 5800, 7000, 12000, 16384):
        computed = multi_head_is_faster([n], [n], 2048, share)
        assert computed == multi_head_is_faster([n], [n], 2048, sizes), n
        if multi_head_is_faster([n], [n], 2048, share, communication):
            chosen.append(n)
    assert chosen == lengths
    # With few tokens after many keys the absorbed form computes less.
    assert not multi_head_is_faster([300], [9000], 2048, share, communication)


@pytest.mark.parametrize("pages", [None, torch.float32, "fp8"], ids=str)
@pytest.mark.parametrize("indexed", [True, False])
@torch.no_grad()
def test_both_forms_give_the_same(indexed, pages, monkeypatch):
    """With and without a cache, in chunks, for a layer with an indexer and for one that takes its selection."""
    torch.manual_seed(3)
    full = PagedAttention(128, 4, PagedIndexer(128, 128, n_heads=64, top_k=16, quantize=True), q_lora_rank=128)
    shared = PagedAttention(128, 4, None, q_lora_rank=128)
    chunks = [[50, 9, 33]] if pages is None else [[20, 4, 30], [30, 5, 3]]
    inputs = [torch.randn(sum(new), 128) for new in chunks]
    monkeypatch.setattr(PagedAttention, "_has_multi_head_kernel", lambda *_: True)

    def run(multi_head):
        monkeypatch.setattr(paged_attention, "multi_head_is_faster", lambda *_: multi_head)
        layers, total, out = [None, None], [0, 0, 0], []
        if pages is not None:
            cache = PagedKVCache(2, 8, 16, latent=pages, index="fp8", index_layers=[0])
            layers = [cache.layer(0), cache.layer(1)]
        for new, x in zip(chunks, inputs):
            total = [before + n for before, n in zip(total, new)]
            batch = SequenceBatch.paged(new, total, [[0, 3, 7, 1], [2], [4, 5, 6]], 16)
            if pages is None:
                batch = SequenceBatch.without_cache(new)
            angles = ROTARY(batch.positions)
            y, selected = full(x, *angles, batch, layers[0])
            assert (selected.bits is not None) == multi_head
            if not indexed:
                y, _ = shared(x, *angles, batch, layers[1], selected)
            out.append(y)
        return torch.cat(out)

    absorbed = run(False)
    assert (run(True) - absorbed).norm() < 1e-5 * absorbed.norm()


@torch.no_grad()
def test_passes_without_a_kernel_take_pytorchs_attention(monkeypatch):
    """The kernel's reference would take a matrix of all queries by all keys."""
    monkeypatch.setattr(paged_attention, "multi_head_is_faster", lambda *_: True)
    monkeypatch.setattr(dsa, "mha_varlen_fwd", None)
    layer = PagedAttention(128, 4, PagedIndexer(128, 128, n_heads=64, top_k=4, quantize=False), q_lora_rank=128)
    for lengths in ([9, 5], [3, 4]):
        batch = SequenceBatch.without_cache(lengths)
        layer(torch.randn(sum(lengths), 128), *ROTARY(batch.positions), batch)
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(dsa.runtime.backends, "runs_kernel", lambda *_: True)
    assert layer._has_multi_head_kernel(x) and not layer._has_multi_head_kernel(x.float())
    wide = PagedAttention(128, 4, None, q_lora_rank=128, nope_dim=200)
    assert not wide._has_multi_head_kernel(x)
