"""The adapters, which translate SGLang's calls into calls of dsa's ops, are compared with formulas in float64."""

import math

import pytest
import torch

from dsa.testing import assert_close, calc_diff
from dsa_engines.sglang import adapters
from tests.engines.sglang import batches
from tests.engines.sglang.batches import BF16, E4M3, INT32, PAGE, int32

LENGTHS = [0, 1, 63, 64, 65, 200]


@pytest.mark.parametrize("k", [1, 512])
def test_topk_as_slots(k):
    logits, lengths, metadata, expected = batches.decode_metadata(LENGTHS)
    logits[:, 1] = -math.inf
    got = adapters.topk_paged(logits, lengths, k, metadata.real_page_table, PAGE)
    assert got.dtype == INT32 and torch.equal(got, expected(k))


@pytest.mark.parametrize("k", [1, 512])
def test_topk_of_prefill_as_slots_positions_and_columns(k):
    logits, lengths, starts, metadata, expected = batches.prefill_metadata([0, 30, 0, 5], [3, 90, 0, 6])
    positions = int32(expected(k))
    assert torch.equal(adapters.topk(logits, lengths, k, starts), positions)
    columns = torch.where(positions < 0, -1, positions + starts[:, None])
    assert torch.equal(adapters.topk_ragged(logits, lengths, k, starts, starts), columns)
    table, owners = metadata.real_page_table, metadata.token_to_batch_idx
    slots = table[owners.long()[:, None], positions.clamp(min=0).long() // PAGE] * PAGE + positions % PAGE
    got = adapters.topk_paged(logits, lengths, k, table, PAGE, starts, owners)
    assert torch.equal(got, torch.where(positions < 0, -1, slots))


@pytest.mark.parametrize(
    ("lengths", "offsets", "want"),
    [
        # If all keys are selected, SGLang computes no scores and passes a dummy tensor. So offsets can exceed the
        # dummy's 8 columns.
        ([3, 0, 5], [1000, 1003, 7], [[1000, 1001, 1002, -1, -1], [-1] * 5, [7, 8, 9, 10, 11]]),
        ([5, 1, 0], [3, 7, 8], [[3, 4, 5, 6, 7], [7, -1, -1, -1, -1], [-1] * 5]),
    ],
)
def test_columns_of_rows_all_of_whose_keys_are_selected(lengths, offsets, want):
    got = adapters.topk_ragged(torch.zeros(3, 8), int32(lengths), 5, int32(offsets))
    assert got.tolist() == want


@pytest.mark.parametrize("with_positions", [False, True])
def test_topk_into_a_part_of_a_wider_buffer(with_positions):
    logits, lengths, metadata, expected = batches.decode_metadata(LENGTHS)
    buffers = torch.full((2, len(LENGTHS), 40), 77, dtype=INT32)
    slots, positions = buffers[:, :, 4:36]
    raw = positions if with_positions else None
    adapters.topk_into(logits, lengths, metadata.real_page_table, slots, PAGE, raw)
    assert torch.equal(slots, expected(32))
    if with_positions:
        assert torch.equal(positions, int32([batches.selected(logits[b, :n], 32) for b, n in enumerate(LENGTHS)]))
    assert (buffers[:, :, :4] == 77).all() and (buffers[:, :, 36:] == 77).all()
    adapters.topk_into(logits, lengths, None, slots, PAGE)
    assert slots.tolist() == [batches.selected(logits[b, :n], 32) for b, n in enumerate(LENGTHS)]


@pytest.mark.parametrize("heads", [8, 64])
def test_prefill_scores(heads):
    k, k_scale = batches.index_keys(70)
    q, weights = torch.randn(5, heads, 128).to(E4M3), torch.randn(5, heads)
    starts, ends = int32([0, 0, 30, 30, 70]), int32([1, 30, 31, 70, 70])
    got = adapters.fp8_mqa_logits(q, (k, k_scale), weights, starts, ends)
    assert got.shape == (5, 70)
    want = batches.index_scores(q, k, k_scale, weights)
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        assert calc_diff(got[row, start:end], want[row, start:end]) < 5e-6
    # For DeepSeek-V4, SGLang passes an empty range for a query that selects all keys that it sees. Scores outside the
    # range are then -inf, so top-k selects all 9 keys.
    compressed = adapters.fp8_mqa_logits(q, (k, k_scale), weights, starts * 0, int32([0, 30, 0, 70, 0]), False, 64)
    assert compressed.shape == (5, 64) and (compressed[0] == -math.inf).all()
    assert calc_diff(compressed[1, :30], want[1, :30]) < 5e-6
    assert adapters.topk(compressed, int32([9, 30, 5, 64, 0]), 16)[0].tolist() == [*range(9), *[-1] * 7]


@pytest.mark.parametrize(("clean", "columns", "cleaned"), [(False, 0, False), (True, 0, True), (False, 64, True)])
def test_prefill_scores_are_cleaned_where_sglang_leaves_them_out(clean, columns, cleaned, monkeypatch):
    """The reference writes -inf for any `clean_logits`, so the test checks the op's arguments."""
    asked = []
    monkeypatch.setattr(adapters.dsa, "fp8_mqa_logits", lambda *given: asked.append(given[5:]))
    adapters.fp8_mqa_logits(None, None, None, None, None, clean, columns)
    assert asked == [(cleaned, columns)]


@pytest.mark.parametrize("next_n", [1, 2, 3, 4])
def test_decode_scores(next_n):
    lengths = [5, 64, 130]
    table, pages = batches.paged(lengths)
    k, k_scale = batches.index_keys(pages * PAGE)
    cache = torch.cat([k.view(torch.uint8).view(pages, -1), k_scale.view(pages, PAGE).view(torch.uint8)], 1)
    q, weights = torch.randn(3, next_n, 32, 128).to(E4M3), torch.randn(3 * next_n, 32)
    visible = int32([[length - next_n + 1 + i for i in range(next_n)] for length in lengths])
    plan = adapters.get_paged_mqa_logits_metadata(visible, PAGE, 132)
    cache = cache.view(pages, PAGE, 1, 132)
    got = adapters.fp8_paged_mqa_logits(q, cache, weights, visible, table, plan, table.shape[1] * PAGE)
    assert got.shape == (3 * next_n, table.shape[1] * PAGE)
    for row, length in enumerate(visible.flatten().tolist()):
        slots = batches.slots_of(table, row // next_n, length)
        want = batches.index_scores(q.flatten(0, 1)[row : row + 1], k[slots], k_scale[slots], weights[row : row + 1])
        assert calc_diff(got[row : row + 1, :length], want) < 5e-6


@pytest.mark.parametrize(("heads", "dim"), [(8, 576), (16, 576), (128, 576), (8, 512)])
@pytest.mark.parametrize("with_sink", [False, True])
def test_prefill_attention(heads, dim, with_sink):
    q, kv = torch.randn(4, heads, dim).to(BF16), torch.randn(90, 1, dim).to(BF16)
    indices = torch.randint(0, 90, (4, 1, 32), dtype=INT32)
    indices[0], indices[1, :, 5:] = -1, -1
    sink = torch.randn(heads) if with_sink else None
    lengths = int32([0, 5, 20, 32])
    counted = indices.masked_fill(torch.arange(32) >= lengths[:, None, None], -1)
    out, top, lse = batches.attention(q, kv.squeeze(1), counted.squeeze(1), 0.1, sink)
    for legacy, unit in ((True, math.log(2)), (False, 1.0)):
        got = adapters.sparse_prefill(q, kv, indices, 0.1, 512, sink, lengths, use_legacy=legacy)
        assert_close("out", got[0], out, abs_tol=8e-4, rel_tol=3.01 / 128, cos_tol=7e-6)
        assert_close("max_logits", got[1] * unit, top, abs_tol=1e-5, rel_tol=1e-5)
        assert_close("lse", got[2] * unit, lse, abs_tol=1e-5, rel_tol=1e-5)


@pytest.mark.parametrize("width", [656, 576])
@pytest.mark.parametrize("heads", [8, 128])
def test_decode_attention(width, heads):
    cache, rows = batches.latent_cache(width, 3)
    q, indices = torch.randn(4, 1, heads, 576).to(BF16), torch.randint(0, 192, (4, 1, 32), dtype=INT32)
    indices[0], indices[1, :, 5:] = -1, -1
    want = batches.attention(q.squeeze(1), rows, indices.squeeze(1), 0.1)
    for invariant in (False, True):
        out, lse = adapters.sparse_decode(q, cache, indices, 512, 0.1, batch_invariant=invariant)
        assert out.shape == (4, 1, heads, 512)
        assert_close("out", out.squeeze(1), want[0], abs_tol=1e-3, rel_tol=2.01 / 128, cos_tol=5e-6)
        assert_close("lse", lse.squeeze(2), want[2], abs_tol=1e-5, rel_tol=1e-5)


@pytest.mark.parametrize("with_entries", [False, True])
def test_v4_attention(with_entries):
    (window, rows), (entries, more) = batches.latent_cache(584, 2), batches.latent_cache(584, 3)
    q, sink = torch.randn(4, 1, 8, 512).to(BF16), torch.randn(8)
    indices, selected = (torch.randint(0, n * PAGE, (4, 1, k), dtype=INT32) for n, k in ((2, 128), (3, 64)))
    counts = int32([128, 7, 0, 1]), int32([64, 3, 0, 1])
    extra = (entries, selected, counts[1]) if with_entries else ()
    out, _ = adapters.sparse_decode(q, window, indices, 512, 0.04, counts[0], sink, *extra)
    counted = [
        index.squeeze(1).masked_fill(torch.arange(index.shape[-1]) >= count[:, None], -1)
        for index, count in zip((indices, selected), counts)
    ]
    second = (more, counted[1]) if with_entries else None
    want, *_ = batches.attention(q.squeeze(1), rows, counted[0], 0.04, sink, second)
    assert_close("out", out.squeeze(1), want, abs_tol=1e-3, rel_tol=2.01 / 128, cos_tol=5e-6)


def test_a_plan_is_copied_and_sliced_as_sglang_does():
    most, batch = adapters.no_plan(int32([1] * 8)), adapters.no_plan(int32([1] * 3))
    assert [x.dtype for x in most] == [INT32, INT32] and most[0].shape == batch[0].shape == (1, 8)
    most[0].copy_(batch[0])
    most[1][: 3 + 1].copy_(batch[1])
    assert len(most[1]) == 9 and not most[1].any()
