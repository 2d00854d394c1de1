"""Selection among packed keys in as little memory as is given: what scores of all tokens at once would select."""

import weakref
from unittest.mock import MagicMock

import pytest
import torch

import dsa
from dsa.kernels.indexer.candidate_lists import CAPACITY
from dsa.kernels.indexer.limits import HEADS
from dsa.kernels.indexer.paged_select_plan import choose_config, sequences_of_launch
from dsa_layers.batch.decode_batch import DecodeBatch
from dsa_layers.batch.entry_view import EntryView
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.cache.kv_cache import LayerCache
from dsa_layers.layers import key_selection
from dsa_layers.layers.indexer import LightningIndexer
from dsa_layers.layers.key_selection import (
    FUSED_BYTES,
    FUSED_PAGED,
    FUSED_SCORES,
    FUSED_SEQUENCES,
    FUSED_SMS,
    ROW_PADDING,
    WORKSPACE,
    select_packed,
    select_paged,
)

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


@pytest.mark.parametrize("workspace", [0, 1, 4 * 3 * (MOST + ROW_PADDING), WORKSPACE])
@pytest.mark.parametrize("quantised", [True, False])
def test_any_workspace_selects_the_same(quantised, workspace):
    q, keys, weights, *ranges = inputs(quantised)
    got = select_packed(q, keys, weights, 16, *ranges, MOST, workspace=workspace)
    assert torch.equal(got, at_once(q, keys, weights, *ranges))
    table = torch.randint(0, 99, (5, 40), dtype=torch.int32)
    rows = torch.repeat_interleave(torch.tensor(QUERIES)).int()
    paging = {"block_table": table, "page_size": 8, "row_to_seq": rows}
    got = select_packed(q, keys, weights, 16, *ranges, MOST, workspace=workspace, **paging)
    assert torch.equal(got, at_once(q, keys, weights, *ranges, **paging))


@pytest.mark.parametrize("tokens", [1, 3, 100])
def test_scores_take_no_more_than_the_workspace(tokens, monkeypatch):
    """And a sequence's tokens have no columns for the keys of others."""
    q, keys, weights, *ranges = inputs(True)
    sizes, scores_of = [], dsa.fp8_mqa_logits

    def scores(*arguments, **options):
        found = scores_of(*arguments, **options)
        assert found.shape[1] == MOST
        sizes.append(found.untyped_storage().nbytes())
        return found

    monkeypatch.setattr(dsa, "fp8_mqa_logits", scores)
    workspace = 4 * tokens * (MOST + ROW_PADDING)
    select_packed(q, keys, weights, 16, *ranges, MOST, workspace=workspace)
    assert max(sizes) <= workspace and len(sizes) == -(-sum(QUERIES) // tokens)


def test_scores_are_dropped_before_the_next_ones(monkeypatch):
    """One matrix at a time; and all have about as many tokens."""
    q, keys, weights, *ranges = inputs(True)
    made, sizes, scores_of = [], [], dsa.fp8_mqa_logits

    def scores(q, *arguments, **options):
        assert all(earlier() is None for earlier in made)
        found = scores_of(q, *arguments, **options)
        made.append(weakref.ref(found))
        sizes.append(len(q))
        return found

    monkeypatch.setattr(dsa, "fp8_mqa_logits", scores)
    select_packed(q, keys, weights, 16, *ranges, MOST, workspace=4 * 11 * (MOST + ROW_PADDING))
    assert sum(QUERIES) == 35 and sizes == [9, 9, 9, 8]


@pytest.mark.parametrize("workspace", [10 * FUSED_BYTES, WORKSPACE])
def test_half_scores_of_many_keys_are_selected_as_they_are_computed(workspace, monkeypatch):
    """For as many tokens at a time as lists of candidates have room for; the result is that of scores in memory."""
    q, keys, weights, *ranges = inputs(True)
    table = torch.randint(0, 99, (5, 40), dtype=torch.int32)
    rows = torch.repeat_interleave(torch.tensor(QUERIES)).int()
    paging = {"block_table": table, "page_size": 8, "row_to_seq": rows}
    half, sizes, select = {"accumulators": torch.float16}, [], dsa.indexer_select
    expected = [select_packed(q, keys, weights, 16, *ranges, MOST, **half, **options) for options in ({}, paging)]

    def selected(q, *arguments, **options):
        sizes.append(len(q))
        return select(q, *arguments, **options)

    monkeypatch.setattr(dsa, "indexer_select", selected)
    monkeypatch.setattr(key_selection, "FUSED_KEYS", MOST)
    monkeypatch.setattr(key_selection, "FUSED_TOKENS", 10)
    for options, wanted in zip(({}, paging), expected):
        got = select_packed(q, keys, weights, 16, *ranges, MOST, **half, workspace=workspace, **options)
        assert torch.equal(got, wanted)
    assert sizes == 2 * ([9, 9, 9, 8] if workspace < WORKSPACE else [35])
    # Of fewer keys or tokens, also where the workspace has no room for more, of exact scores, and of more than the
    # kernel selects, scores are in memory.
    select_packed(q, keys, weights, 16, *ranges, MOST - 1, **half)
    select_packed(q[:9], keys, weights[:9], 16, *(x[:9] for x in ranges), MOST, **half)
    select_packed(q, keys, weights, 16, *ranges, MOST, **half, workspace=10 * FUSED_BYTES - 1)
    select_packed(q, keys, weights, 16, *ranges, MOST)
    select_packed(q, keys, weights, 2049, *ranges, MOST, **half)
    assert len(sizes) in (2, 8)


def test_a_list_has_room_in_what_is_counted_for_it():
    """Entries of 8 bytes; counts, the bound, and the end of what is left to select from."""
    assert 8 * CAPACITY + 16 <= FUSED_BYTES


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
    scored, scores_of = [], key_selection.index_scores
    monkeypatch.setattr(dsa, "mqa_logits", None)
    monkeypatch.setattr(
        key_selection, "index_scores", lambda q, k, w: scored.append((len(q), len(k))) or scores_of(q, k, w)
    )
    for options, wanted in zip(({}, paging), expected):
        assert torch.equal(select_packed(*given, key_lens=lens, **options), wanted)
    assert scored == 2 * [(next_n, n) for n in lens]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(select_packed(*given, key_lens=lens), expected[0])
    parts, topk = [], dsa.topk_indices
    noted = lambda scores, *k, **options: parts.append(scores.numel()) or topk(scores, *k, **options)  # noqa: E731
    monkeypatch.setattr(dsa, "topk_indices", noted)
    for sequences in (1, 2):
        bytes_of_scores = 4 * sequences * next_n * max(lens)
        for options, wanted in zip(({}, paging), expected):
            got = select_packed(*given, key_lens=lens, workspace=bytes_of_scores, **options)
            assert torch.equal(got, wanted)
        assert 4 * max(parts) == bytes_of_scores and len(parts) == 2 * -(-len(lens) // sequences)
        parts.clear()


def test_sequences_without_memory_are_not_scored(monkeypatch):
    """Passes that list a model's kernels have a thousand of them."""
    monkeypatch.setattr(key_selection, "index_scores", None)
    q, keys = torch.empty(6, 2, 8, device="meta"), torch.empty(9, 8, device="meta").split((4, 2, 3))
    assert key_selection._scores_by_sequence(q, keys, q[..., 0], 4).shape == (6, 4)


@pytest.mark.parametrize("sequences", [1, 4])
def test_decoding_with_float_index_keys(sequences, monkeypatch):
    """One sequence has all keys: its tokens are scored as a prompt's are."""
    torch.manual_seed(0)
    indexer = LightningIndexer(64, 32, n_heads=2, head_dim=128, top_k=4, quantize=False)
    scored, scores_of = [], key_selection.index_scores
    monkeypatch.setattr(
        key_selection, "index_scores", lambda q, k, w: scored.append((len(q), len(k))) or scores_of(q, k, w)
    )
    cache = LayerCache(torch.zeros(8, 32, 1, 576), torch.randn(8, 32, 1, 128))
    table = torch.arange(8, dtype=torch.int32).view(4, 2)[:sequences]
    lengths = torch.tensor([40, 64, 5, 33], dtype=torch.int32)[:sequences]
    angles = torch.randn(sequences, 32)
    given = torch.randn(sequences, 64), torch.randn(sequences, 32), angles.cos(), angles.sin()
    found = indexer.select(*given, DecodeBatch(table, 32, lengths, 64), cache)
    assert scored == (sequences > 1) * sequences * [(1, 64)]
    for i in range(sequences):
        own = DecodeBatch(table[i : i + 1], 32, lengths[i : i + 1], 64)
        assert torch.equal(indexer.select(*(x[i : i + 1] for x in given), own, cache)[0], found[i])


def test_nothing_to_select_from():
    q, (keys, scales), weights, starts, lengths = inputs(True)
    none = select_packed(q, (keys[:0], scales[:0]), weights, 16, starts * 0, lengths * 0, 0)
    assert none.shape == (sum(QUERIES), 16) and none.eq(-1).all()
    assert select_packed(q[:0], (keys, scales), weights[:0], 16, starts[:0], lengths[:0], MOST).shape == (0, 16)


@pytest.mark.parametrize("quantize", [True, False])
def test_an_indexer_has_a_workspace_of_its_own(quantize, monkeypatch):
    torch.manual_seed(0)
    indexer = LightningIndexer(64, 32, n_heads=2, head_dim=128, top_k=4, quantize=quantize, workspace=1)
    op = "fp8_mqa_logits" if quantize else "mqa_logits"
    sizes, scores_of = [], getattr(dsa, op)
    monkeypatch.setattr(dsa, op, lambda q, *rest, **options: sizes.append(len(q)) or scores_of(q, *rest, **options))
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


@pytest.fixture
def called(monkeypatch):
    """The ops of `select_paged` that were called, and plans that were made."""
    names = []
    for name in ("paged_indexer_select", "fp8_paged_mqa_logits", "topk_indices", "get_paged_mqa_logits_metadata"):
        op = getattr(dsa, name)
        monkeypatch.setattr(dsa, name, lambda *a, name=name, op=op, **o: names.append(name) or op(*a, **o))
    return names


@pytest.mark.parametrize("page_size", [None, 32])
def test_few_sequences_are_selected_in_one_launch(page_size, called, monkeypatch):
    """As of scores in memory, of which alone there is a plan; and all layers share a workspace."""
    monkeypatch.setattr(key_selection, "FUSED_PAGED", range(128, 129))
    decoding, arguments = pages_of(4, 1)
    got = select_paged(*arguments, page_size)
    assert called == ["paged_indexer_select"]
    workspace = decoding.index_workspace
    assert len(workspace) == 4 and not workspace.any()
    assert torch.equal(select_paged(*arguments, page_size), got) and decoding.index_workspace is workspace
    assert EntryView(decoding, 4).index_workspace is workspace
    monkeypatch.setattr(key_selection, "FUSED_SEQUENCES", 3)
    called.clear()
    decoding, arguments = pages_of(4, 1)
    assert torch.equal(select_paged(*arguments, page_size), got)
    assert torch.equal(select_paged(*arguments, page_size), got)
    two = ["fp8_paged_mqa_logits", "topk_indices"]
    assert called == ["get_paged_mqa_logits_metadata", *two, *two]
    assert "index_workspace" not in vars(decoding)


@pytest.mark.parametrize(
    ("constant", "number", "top_k", "next_n"),
    [
        ("FUSED_SCORES", 4 * 128 - 1, 16, 1),
        ("FUSED_SEQUENCES", 0, 16, 1),
        ("FUSED_SEQUENCES", 32, 2049, 1),
        ("FUSED_PAGED", range(129, 200), 16, 1),
        ("FUSED_PAGED", range(1, 200), 16, 2),
    ],
)
def test_other_selections_from_pages_have_their_scores_in_memory(constant, number, top_k, next_n, called, monkeypatch):
    monkeypatch.setattr(key_selection, "FUSED_PAGED", range(1, 200))
    monkeypatch.setattr(key_selection, constant, number)
    select_paged(*pages_of(4, next_n, top_k=top_k)[1])
    assert "paged_indexer_select" not in called and "topk_indices" in called


@pytest.mark.parametrize(("multiprocessors", "op"), [(59, "topk_indices"), (60, "paged_indexer_select")])
def test_a_part_of_a_gpu_may_lack_the_room(multiprocessors, op, monkeypatch):
    monkeypatch.setattr(key_selection, "FUSED_PAGED", range(128, 129))
    monkeypatch.setattr(dsa, "num_sms", lambda device: multiprocessors if device.type == "cuda" else 132)
    for name in ("paged_indexer_select", "fp8_paged_mqa_logits", "topk_indices"):
        monkeypatch.setattr(dsa, name, lambda *a, name=name, **o: name)
    _, (_, *arguments) = pages_of(4, 1)
    q = MagicMock(shape=(4, 1, 8, 32), device=torch.device("cuda"))
    q.unflatten.return_value, q.__len__.return_value = q, 4
    assert select_paged(q, *arguments) == op


@pytest.mark.parametrize("multiprocessors", [FUSED_SMS, 78, 114, 132])
def test_what_is_selected_in_one_launch_has_room(multiprocessors):
    """No model is refused for its context: where one launch is asked for, one sequence at least has room in it."""
    for heads in HEADS:
        room = choose_config(heads, 1, False).capacity(heads, 1, False)
        for sequences in range(1, FUSED_SEQUENCES + 1):
            most = min(FUSED_SCORES // sequences, FUSED_PAGED[-1])
            assert sequences_of_launch(most, room, multiprocessors) >= 1
