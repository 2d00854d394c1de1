"""Which form attention over selected keys takes, and that both give the same."""

import itertools
from dataclasses import replace

import pytest
import torch

import dsa
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.kv_cache import PagedKVCache
from dsa_layers.layers import attention, attention_form
from dsa_layers.layers.attention import DSAAttention, Selection
from dsa_layers.layers.attention_form import Communication, HeadSizes, multi_head_is_faster
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.rope import RotaryEmbedding, rope_frequencies

V32, GLM5 = HeadSizes(128, 128, 64, 128, 512), HeadSizes(64, 192, 64, 256, 512)
ROTARY = RotaryEmbedding(rope_frequencies(64, 1e4))


def test_keys_are_counted_as_tokens_see_them():
    for new, total, top_k in itertools.product((0, 1, 3, 7), (7, 10, 30), (1, 5, 8, 40)):
        seen = range(total - new + 1, total + 1)
        assert attention_form.visible_keys(new, total) == sum(seen)
        assert attention_form._beyond(new, total, top_k) == sum(max(n - top_k, 0) for n in seen)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([4096], True), ([3000] * 4, True), ([2100, 500, 100], True), ([16384], False), ([65536], False)],
)
def test_short_prompts_take_the_multi_head_form(lengths, expected):
    assert multi_head_is_faster(lengths, lengths, 2048, V32) is expected


def test_chunks_behind_a_long_prefix_take_the_absorbed_form():
    for new, total in ((4096, 32768), (8192, 131072), (16, 8192), (1, 2049)):
        assert not multi_head_is_faster([new], [total], 2048, V32)
    assert multi_head_is_faster([2048], [4096], 2048, V32)


def test_many_prefixes_are_not_expanded(monkeypatch):
    """A few new tokens each, of so many sequences that all heads' keys and values would take 8 GB."""
    lengths = [150] * 54, [2300] * 54, 2048, V32
    assert not multi_head_is_faster(*lengths)
    monkeypatch.setattr(attention_form, "EXPANDED_BYTES", 16 << 30)
    assert multi_head_is_faster(*lengths)


def test_it_is_for_prompts_of_up_to_a_length():
    for sizes in (V32, GLM5):
        forms = [multi_head_is_faster([n], [n], 2048, sizes) for n in range(2049, 40000, 500)]
        assert forms == sorted(forms, reverse=True) and forms[0] and not forms[-1]


def of_processes(sizes, result, latents, count):
    """What follows top_k in `multi_head_is_faster`, of a model's process: hidden and q_lora_rank in FP8, 2048 picks."""
    return replace(sizes, heads=sizes.heads // count), Communication(count, 2 * result + latents + 4 * 2048, 3)


def test_what_is_said_takes_time():
    """A collective 20 us, and of 280 tokens' 1000 bytes three quarters from three of four processes, 0.21 MB a us."""
    assert Communication(4, 1000, 2).microseconds(280) == pytest.approx(2 * 20 + 1)
    assert Communication(2, 1000, 1).microseconds(420) == pytest.approx(20 + 1)


@pytest.mark.parametrize(
    ("model", "processes", "lengths"),
    [
        ((V32, 7168, 1584), 4, [3000, 4096, 5800]),
        ((V32, 7168, 1584), 8, []),
        ((GLM5, 6144, 2112), 2, [3000, 4096]),
        ((GLM5, 6144, 2112), 4, []),
        ((GLM5, 6144, 2112), 8, []),
    ],
)
def test_the_form_that_says_more_is_for_fewer_prompts(model, processes, lengths):
    """Than it would be by what is computed, which many processes share; of a prompt that is hardly longer than what is
    selected, both compute about the same."""
    sizes, communication = of_processes(*model, processes)
    chosen = []
    for n in (2100, 3000, 4096, 5800, 7000, 12000, 16384):
        computed = multi_head_is_faster([n], [n], 2048, sizes)
        assert computed == multi_head_is_faster([n], [n], 2048, model[0]), n
        chosen += [n] if multi_head_is_faster([n], [n], 2048, sizes, communication) else []
        assert computed or n not in chosen
    assert chosen == lengths
    # Few tokens behind many keys: whatever is said, the absorbed form computes less.
    assert not multi_head_is_faster([300], [9000], 2048, sizes, communication)


@pytest.mark.parametrize("pages", [None, torch.float32, "fp8"], ids=str)
@pytest.mark.parametrize("indexed", [True, False])
def test_both_forms_give_the_same(indexed, pages, monkeypatch):
    """With and without a cache, in chunks; of a layer with an indexer, and of one that shares its selection."""
    torch.manual_seed(3)
    indexer = LightningIndexer(128, 128, n_heads=64, top_k=16, quantize=True)
    full = DSAAttention(128, 4, indexer, q_lora_rank=128)
    layer = full if indexed else DSAAttention(128, 4, None, q_lora_rank=128)
    lengths = [50, 9, 33]
    x = torch.randn(sum(lengths), 128)
    chunks = [lengths] if pages is None else [[20, 4, 30], [30, 5, 3]]
    monkeypatch.setattr(DSAAttention, "_has_multi_head_kernel", lambda *_: True)
    results, forms = [], []
    for multi_head in (True, False):
        monkeypatch.setattr(attention, "multi_head_is_faster", lambda *_, form=multi_head: forms.append(form) or form)
        cache = None if pages is None else PagedKVCache(2, 8, 16, latent=pages, index="fp8", index_layers=[0])
        done, out = [0] * 3, [[], [], []]
        for new in chunks:
            total = [a + b for a, b in zip(done, new)]
            parts = [x.split(lengths)[i][a:b] for i, (a, b) in enumerate(zip(done, total))]
            if cache is None:
                batch = SequenceBatch.without_cache(new)
            else:
                batch = SequenceBatch.paged(new, total, [[0, 3, 7, 1], [2], [4, 5, 6]], 16)
            selection, angles = Selection(), ROTARY(batch.positions)
            own = [cache and cache.layer(i) for i in range(2)]
            with torch.no_grad():
                got = full(torch.cat(parts), *angles, batch, own[0], selection)
                if not indexed:
                    got = layer(torch.cat(parts), *angles, batch, own[1], selection)
            assert (selection.bits is not None) == multi_head
            for row, part in zip(out, got.split(new)):
                row.append(part)
            done = total
        results.append(torch.cat([torch.cat(row) for row in out]))
    assert {*forms} == {True, False}
    assert (results[0] - results[1]).norm() < 1e-5 * results[1].norm()


def test_passes_with_gradients_and_without_a_kernel_take_pytorchs_attention(monkeypatch):
    """One kernel is for inference; a reference in its place would take a matrix of all queries by all keys."""
    monkeypatch.setattr(attention, "multi_head_is_faster", lambda *_: True)
    monkeypatch.setattr(dsa, "mha_varlen_fwd", None)
    layer = DSAAttention(128, 4, LightningIndexer(128, 128, n_heads=64, top_k=4, quantize=False), q_lora_rank=128)
    for lengths in ([9, 5], [3, 4]):
        batch, x = SequenceBatch.without_cache(lengths), torch.randn(sum(lengths), 128, requires_grad=True)
        with torch.no_grad():
            layer(x, *ROTARY(batch.positions), batch)
        layer(x, *ROTARY(batch.positions), batch).square().sum().backward()
        assert x.grad.abs().sum() > 0 and layer.kv_b_proj.weight.grad.abs().sum() > 0
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    monkeypatch.setattr(dsa.backends, "runs_kernel", lambda *_: True)
    with torch.no_grad():
        assert layer._has_multi_head_kernel(x) and not layer._has_multi_head_kernel(x.float())
        wide = DSAAttention(128, 4, None, q_lora_rank=128, nope_dim=200)
        assert not wide._has_multi_head_kernel(x)
    assert not layer._has_multi_head_kernel(x)
