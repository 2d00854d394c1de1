"""Selection in chunks of tokens, by sequence or in one fused kernel equals selection from all scores at once."""

import weakref

import pytest
import torch

import dsa
from dsa.kernels.indexer.candidate_lists import CAPACITY
from dsa_layers.layers import key_selection
from dsa_layers.layers.key_selection import FUSED_BYTES, ROW_PADDING, WORKSPACE, KeySelection
from tests.layers.layers import small_layers
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


def select_packed(q, keys, weights, top_k, *ranges, key_lens=None, paging=None, **options):
    return KeySelection(top_k, **options).select_packed(q, keys, weights, ranges, key_lens, paging)


@pytest.fixture(params=[False, True], ids=["positions", "slots"])
def paging(request):
    if not request.param:
        return {}
    table = torch.randint(0, 99, (5, 40), dtype=torch.int32)
    return {"block_table": table, "page_size": 8, "row_to_seq": torch.repeat_interleave(torch.tensor(QUERIES)).int()}


@pytest.mark.parametrize("tokens", [1, 3, 1000])
@pytest.mark.parametrize("quantised", [True, False])
def test_any_workspace_selects_the_same(quantised, tokens, paging):
    q, keys, weights, starts, lengths = inputs(quantised)
    logits = dsa.fp8_mqa_logits if quantised else dsa.mqa_logits
    scores = logits(q, keys, weights, starts, starts + lengths)
    expected = dsa.topk_indices(scores, 16, starts=starts, lengths=lengths, **paging)
    workspace = 4 * tokens * (MOST + ROW_PADDING)
    got = select_packed(q, keys, weights, 16, starts, lengths, MOST, workspace=workspace, paging=paging)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("tokens", "sizes"), [(3, [3] * 11 + [2]), (11, [9, 9, 9, 8]), (100, [35])], ids=str)
def test_scores_take_no_more_than_the_workspace(tokens, sizes, monkeypatch):
    q, keys, weights, *ranges = inputs(True)
    made, scores_of, workspace = [], dsa.fp8_mqa_logits, 4 * tokens * (MOST + ROW_PADDING)

    def scores(*arguments, **options):
        assert all(earlier() is None for _, earlier in made), "two matrices at a time"
        scores = scores_of(*arguments, **options)
        made.append((len(scores), weakref.ref(scores)))
        assert scores.shape[1] == MOST and scores.untyped_storage().nbytes() <= workspace
        return scores

    monkeypatch.setattr(dsa, "fp8_mqa_logits", scores)
    select_packed(q, keys, weights, 16, *ranges, MOST, workspace=workspace)
    assert [size for size, _ in made] == sizes


@pytest.fixture
def fused(monkeypatch):
    """Let small inputs use fused selection. Return a list that collects the number of tokens of each fused call."""
    monkeypatch.setattr(key_selection, "FUSED_KEYS", MOST)
    monkeypatch.setattr(key_selection, "FUSED_TOKENS", 10)
    return record(monkeypatch, "indexer_select", seen=lambda q, *_, **__: len(q))


@pytest.mark.parametrize(("workspace", "sizes"), [(10 * FUSED_BYTES, [9, 9, 9, 8]), (WORKSPACE, [35])])
def test_fused_selection_equals_that_from_scores_in_memory(workspace, sizes, paging, fused, monkeypatch):
    q, keys, weights, *ranges = inputs(True)
    given, options = (q, keys, weights, 16, *ranges, MOST), {"accumulators": torch.float16, "paging": paging}
    with monkeypatch.context() as patch:
        patch.setattr(key_selection, "FUSED_KEYS", MOST + 1)
        expected = select_packed(*given, **options)
    assert not fused
    assert torch.equal(select_packed(*given, workspace=workspace, **options), expected) and fused == sizes
    # `_select` in dsa/ops/indexer/indexer_select.py allocates, per token, a list of CAPACITY candidates of 8 bytes and
    # four numbers of 4 bytes: the list's two counts, a bound of scores, and the end of the token's keys.
    assert 8 * CAPACITY + 16 <= FUSED_BYTES


@pytest.mark.parametrize(
    ("top_k", "options"),
    [(16, {"workspace": 10 * FUSED_BYTES - 1}), (16, {"accumulators": torch.float32}), (2049, {})],
    ids=["little room", "fp32 scores", "more than the kernel selects"],
)
def test_selections_that_the_kernel_does_not_take_are_not_fused(top_k, options, fused):
    q, keys, weights, *ranges = inputs(True)
    select_packed(q, keys, weights, top_k, *ranges, MOST, **{"accumulators": torch.float16} | options)
    assert not fused


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("paged", [False, True])
def test_decoding_tokens_are_scored_with_the_float_keys_of_their_sequence(paged, next_n, monkeypatch):
    lens, seen = (40, 3, 0, 64, 7), (33, 3, 0, 64, 6)
    starts = torch.tensor([sum(lens[:i]) for i in range(len(lens))]).int().repeat_interleave(next_n)
    after = torch.arange(1 - next_n, 1, dtype=torch.int32)
    lengths = (torch.tensor(seen)[:, None] + after).clamp(min=0).flatten().int()
    tokens = len(lens) * next_n
    # Scores of small integers are exact in any order of summation, and many are equal.
    shapes = (tokens, 8, 32), (sum(lens), 32), (tokens, 8)
    q, keys, weights = (torch.randint(-3, 4, shape).float() for shape in shapes)
    for start, count, own in zip(starts[::next_n].tolist(), seen, lens):
        keys[start + count : start + own] = torch.nan
    given, paging = (q, keys, weights, 16, starts, lengths, max(lens)), None
    if paged:
        paging = {"block_table": torch.randint(0, 99, (len(lens), 8), dtype=torch.int32), "page_size": 8}
        paging["row_to_seq"] = torch.arange(len(lens), dtype=torch.int32).repeat_interleave(next_n)
    expected = select_packed(*given, paging=paging)
    scored = record(monkeypatch, "mqa_logits", seen=lambda q, k, *_: (len(q), len(k)))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(select_packed(*given, key_lens=lens, paging=paging), expected)
    assert scored == [(next_n, n) for n in lens if n]


def test_nothing_is_selected_from_no_keys_and_for_no_tokens():
    q, (keys, scales), weights, starts, lengths = inputs(True)
    none = select_packed(q, (keys[:0], scales[:0]), weights, 16, starts * 0, lengths * 0, 0)
    assert none.shape == (sum(QUERIES), 16) and none.eq(-1).all()
    assert select_packed(q[:0], (keys, scales), weights[:0], 16, starts[:0], lengths[:0], MOST).shape == (0, 16)


@pytest.mark.parametrize("kind", small_layers.INDEXERS, ids=lambda kind: kind.__name__)
def test_an_indexer_selects_in_its_own_workspace(kind, monkeypatch):
    case = small_layers.CASES[kind]
    indexer, x = case.make(), case.inputs()
    indexer.workspace = 1
    sizes = record(monkeypatch, "mqa_logits", seen=lambda q, *_, **__: len(q))
    found = case.run(indexer, x)
    assert sizes == [1] * len(x)
    indexer.workspace = WORKSPACE
    assert torch.equal(case.run(indexer, x), found) and sizes[len(x) :] == [len(x)]
