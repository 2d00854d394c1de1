"""Selection among packed keys in as little memory as is given: what scores of all tokens at once would select."""

import weakref

import pytest
import torch

import dsa
from dsa.kernels.indexer.candidate_lists import CAPACITY
from dsa_layers.batch.decode_batch import DecodeBatch
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.layers import key_selection
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.key_selection import (
    FUSED_BYTES,
    ROW_PADDING,
    WORKSPACE,
    select_packed,
    select_paged,
)
from tests.layers.layers.calls import record

QUERIES, KEYS = (5, 1, 9, 0, 20), (40, 1, 9, 7, 300)
MOST = max(KEYS)


def inputs(quantised):
    torch.manual_seed(1)
    tokens, rows = sum(QUERIES), sum(KEYS)
    starts = torch.tensor([sum(KEYS[:i]) for i, n in enumerate(QUERIES) for _ in range(n)]).int()
    lengths = torch.cat([torch.arange(k - n + 1, k + 1) for n, k in zip(QUERIES, KEYS)]).int()
    q, keys, weights = torch.randn(tokens, 8, 32), torch.randn(rows, 32), torch.randn(tokens, 8)
    if quantised:
        q, keys = q.to(torch.float8_e4m3fn), (keys.to(torch.float8_e4m3fn), torch.rand(rows) + 0.5)
    return q, keys, weights, starts, lengths


def at_once(q, keys, weights, starts, lengths, **paging):
    ranges = starts, starts + lengths
    quantised = isinstance(keys, tuple)
    scores = dsa.fp8_mqa_logits(q, keys, weights, *ranges) if quantised else dsa.mqa_logits(q, keys, weights, *ranges)
    return dsa.topk_indices(scores, 16, starts=starts, lengths=lengths, **paging)


@pytest.fixture
def paging():
    rows = torch.repeat_interleave(torch.tensor(QUERIES)).int()
    table = torch.randint(0, 99, (5, 40), dtype=torch.int32)
    return {"block_table": table, "page_size": 8, "row_to_seq": rows}


@pytest.mark.parametrize("workspace", [0, 4 * 3 * (MOST + ROW_PADDING), WORKSPACE])
@pytest.mark.parametrize("quantised", [True, False])
def test_any_workspace_selects_the_same(quantised, workspace, paging):
    q, keys, weights, *ranges = inputs(quantised)
    for options in ({}, paging):
        got = select_packed(q, keys, weights, 16, *ranges, MOST, workspace=workspace, **options)
        assert torch.equal(got, at_once(q, keys, weights, *ranges, **options))


@pytest.mark.parametrize(
    ("tokens", "sizes"), [(1, [1] * 35), (3, [3] * 11 + [2]), (11, [9, 9, 9, 8]), (100, [35])], ids=str
)
def test_scores_take_no_more_than_the_workspace(tokens, sizes, monkeypatch):
    """One matrix at a time, of about as many tokens each, without columns for the keys of other sequences."""
    q, keys, weights, *ranges = inputs(True)
    made, found, scores_of = [], [], dsa.fp8_mqa_logits

    def scores(q, *arguments, **options):
        assert all(earlier() is None for earlier in made)
        scores = scores_of(q, *arguments, **options)
        made.append(weakref.ref(scores))
        found.append(len(q))
        assert scores.shape[1] == MOST and scores.untyped_storage().nbytes() <= workspace
        return scores

    monkeypatch.setattr(dsa, "fp8_mqa_logits", scores)
    workspace = 4 * tokens * (MOST + ROW_PADDING)
    select_packed(q, keys, weights, 16, *ranges, MOST, workspace=workspace)
    assert sorted(found) == sorted(sizes)


@pytest.fixture
def fused(monkeypatch):
    """How many tokens each selection has that computes the scores itself, of half scores and these keys and tokens."""
    monkeypatch.setattr(key_selection, "FUSED_KEYS", MOST)
    monkeypatch.setattr(key_selection, "FUSED_TOKENS", 10)
    return record(monkeypatch, "indexer_select", seen=lambda q, *_, **__: len(q))


@pytest.mark.parametrize(("workspace", "sizes"), [(10 * FUSED_BYTES, [9, 9, 9, 8]), (WORKSPACE, [35])])
def test_half_scores_of_many_keys_are_selected_as_they_are_computed(workspace, sizes, paging, fused, monkeypatch):
    """For as many tokens at a time as lists of candidates have room for; the result is that of scores in memory."""
    q, keys, weights, *ranges = inputs(True)
    for options in ({}, paging):
        given = q, keys, weights, 16, *ranges, MOST
        with monkeypatch.context() as patch:
            patch.setattr(key_selection, "FUSED_KEYS", MOST + 1)
            expected = select_packed(*given, accumulators=torch.float16, **options)
        assert not fused
        got = select_packed(*given, accumulators=torch.float16, workspace=workspace, **options)
        assert torch.equal(got, expected) and fused == sizes
        fused.clear()
    # An entry of a list has 8 bytes; counts, the bound, and the end of what is left to select from take 16.
    assert 8 * CAPACITY + 16 <= FUSED_BYTES


@pytest.mark.parametrize(
    ("tokens", "top_k", "most", "accumulators", "workspace"),
    [
        (35, 16, MOST - 1, torch.float16, WORKSPACE),
        (9, 16, MOST, torch.float16, WORKSPACE),
        (35, 16, MOST, torch.float16, 10 * FUSED_BYTES - 1),
        (35, 16, MOST, torch.float32, WORKSPACE),
        (35, 2049, MOST, torch.float16, WORKSPACE),
    ],
    ids=["keys", "tokens", "room", "exact scores", "more than the kernel selects"],
)
def test_other_scores_are_in_memory(tokens, top_k, most, accumulators, workspace, fused):
    q, (keys, scales), weights, *ranges = inputs(True)
    given = q[:tokens], (keys, scales), weights[:tokens], top_k, *(x[:tokens] for x in ranges), most
    select_packed(*given, accumulators=accumulators, workspace=workspace)
    assert not fused


@pytest.mark.parametrize("next_n", [1, 3])
def test_decoding_tokens_are_scored_with_their_own_keys(next_n, monkeypatch):
    """Of float keys, whatever others have; what is behind a token's last key is not read."""
    torch.manual_seed(3)
    lens, seen = (40, 3, 0, 64, 7), (33, 3, 0, 64, 6)
    starts = torch.tensor([sum(lens[:i]) for i in range(len(lens))]).int().repeat_interleave(next_n)
    behind = torch.arange(1 - next_n, 1, dtype=torch.int32)
    lengths = (torch.tensor(seen)[:, None] + behind).clamp(min=0).flatten().int()
    tokens = len(lens) * next_n
    # Small integers: scores are exact in whatever order they are summed, and many are equal.
    q, keys, weights = (
        torch.randint(-3, 4, shape).float() for shape in ((tokens, 8, 32), (sum(lens), 32), (tokens, 8))
    )
    for start, count, own in zip(starts[::next_n].tolist(), seen, lens):
        keys[start + count : start + own] = torch.nan
    given = q, keys, weights, 16, starts, lengths, max(lens)
    paging = {"block_table": torch.randint(0, 99, (len(lens), 8), dtype=torch.int32), "page_size": 8}
    paging["row_to_seq"] = torch.arange(len(lens), dtype=torch.int32).repeat_interleave(next_n)
    expected = [select_packed(*given, **options) for options in ({}, paging)]
    monkeypatch.setattr(dsa, "mqa_logits", None)
    scored = record(monkeypatch, "index_scores", seen=lambda q, k, w: (len(q), len(k)), owner=key_selection)
    for options, wanted in zip(({}, paging), expected):
        assert torch.equal(select_packed(*given, key_lens=lens, **options), wanted)
    assert scored == 2 * [(next_n, n) for n in lens]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(select_packed(*given, key_lens=lens), expected[0])
    parts = record(monkeypatch, "topk_indices", seen=lambda scores, *_, **__: 4 * scores.numel())
    bytes_of_scores = 4 * 2 * next_n * max(lens)  # of two of five sequences
    for options, wanted in zip(({}, paging), expected):
        got = select_packed(*given, key_lens=lens, workspace=bytes_of_scores, **options)
        assert torch.equal(got, wanted)
    assert max(parts) == bytes_of_scores and len(parts) == 2 * 3


def test_sequences_without_memory_are_not_scored(monkeypatch):
    """Passes that list a model's kernels have a thousand of them."""
    monkeypatch.setattr(key_selection, "index_scores", None)
    q, keys = torch.empty(6, 2, 8, device="meta"), torch.empty(9, 8, device="meta").split((4, 2, 3))
    assert key_selection._scores_by_sequence(q, keys, q[..., 0], 4).shape == (6, 4)


@pytest.mark.parametrize("sequences", [1, 4])
def test_decoding_with_float_index_keys_scores_sequences_by_themselves(sequences, monkeypatch):
    """But one sequence has all keys: its tokens are scored as a prompt's are."""
    indexer = LightningIndexer(64, 32, n_heads=2, head_dim=128, top_k=4, quantize=False)
    scored = record(monkeypatch, "index_scores", seen=lambda q, k, w: (len(q), len(k)), owner=key_selection)
    cache = LayerCache(torch.zeros(8, 32, 1, 576), torch.randn(8, 32, 1, 128))
    table = torch.arange(8, dtype=torch.int32).view(4, 2)[:sequences]
    lengths = torch.tensor([40, 64, 5, 33], dtype=torch.int32)[:sequences]
    angles = torch.randn(sequences, 32)
    given = torch.randn(sequences, 64), torch.randn(sequences, 32), angles.cos(), angles.sin()
    indexer.select(*given, DecodeBatch(table, 32, lengths, 64), cache)
    assert scored == ([] if sequences == 1 else [(1, 64)] * sequences)


def test_nothing_to_select_from():
    q, (keys, scales), weights, starts, lengths = inputs(True)
    none = select_packed(q, (keys[:0], scales[:0]), weights, 16, starts * 0, lengths * 0, 0)
    assert none.shape == (sum(QUERIES), 16) and none.eq(-1).all()
    assert select_packed(q[:0], (keys, scales), weights[:0], 16, starts[:0], lengths[:0], MOST).shape == (0, 16)


@pytest.mark.parametrize("quantize", [True, False])
def test_an_indexer_has_a_workspace_of_its_own(quantize, monkeypatch):
    indexer = LightningIndexer(64, 32, n_heads=2, head_dim=128, top_k=4, quantize=quantize, workspace=1)
    op = "fp8_mqa_logits" if quantize else "mqa_logits"
    sizes = record(monkeypatch, op, seen=lambda q, *_, **__: len(q))
    batch = SequenceBatch.without_cache([5, 7])
    angles = torch.randn(12, 32)
    arguments = torch.randn(12, 64), torch.randn(12, 32), angles.cos(), angles.sin(), batch
    found = indexer.select(*arguments)
    assert sizes == [1] * 12
    indexer.workspace = WORKSPACE
    assert torch.equal(indexer.select(*arguments), found) and sizes[12:] == [12]


def pages_of(batch, next_n, page_size=32, pages=4, top_k=16):
    """A decoding batch, its cache's pages, and the arguments of `select_paged` that follow from them."""
    torch.manual_seed(2)
    table = torch.randperm(batch * pages).int().view(batch, pages)
    lengths = torch.randint(next_n, pages * page_size + 1, (batch,), dtype=torch.int32)
    decoding = DecodeBatch(table, page_size, lengths, pages * page_size, next_n=next_n)
    cache = torch.zeros(batch * pages, page_size, 1, 36, dtype=torch.uint8)
    keys = torch.randn(batch * pages * page_size, 32).to(torch.float8_e4m3fn)
    dsa.write_indexer_cache(keys, torch.rand(len(keys)) + 0.5, cache, torch.arange(len(keys)))
    q, weights = torch.randn(batch * next_n, 8, 32).to(torch.float8_e4m3fn), torch.randn(batch * next_n, 8)
    return decoding, (q, cache, table, weights, top_k, decoding.visible_by_sequence, decoding, pages * page_size)


@pytest.mark.parametrize("page_size", [None, 32])
def test_layers_that_select_from_pages_share_a_plan(page_size, monkeypatch):
    names = "paged_indexer_select", "fp8_paged_mqa_logits", "topk_indices", "get_paged_mqa_logits_metadata"
    called = record(monkeypatch, *names)
    _, arguments = pages_of(4, 1)
    got = select_paged(*arguments, page_size)
    assert torch.equal(select_paged(*arguments, page_size), got)
    two = ["fp8_paged_mqa_logits", "topk_indices"]
    assert called == ["get_paged_mqa_logits_metadata", *two, *two]
    q, cache, table, weights, top_k, lengths, _, most = arguments
    options = {"slots": page_size is not None}
    assert torch.equal(
        dsa.paged_indexer_select(q[:, None], cache, weights, lengths, table, most, top_k, **options), got
    )
