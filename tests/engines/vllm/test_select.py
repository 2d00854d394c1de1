"""Index scores and top-k of a prompt as one op. The selections are those of the scores in float64."""

import pytest
import torch

from dsa_engines.vllm import select
from tests.engines.sglang.batches import index_keys, index_scores, int32, selected
from tests.engines.vllm.stand_in import Original, never

HEADS, DIM, TOPK = 8, 128, 16
STARTS, ENDS = [0, 0, 0, 60, 60, 60], [1, 17, 60, 61, 75, 130]  # two sequences; some queries have fewer than TOPK keys


@pytest.fixture(autouse=True)
def _short_contexts(monkeypatch):
    monkeypatch.setattr(select, "LEAST_KEYS", 70)
    monkeypatch.setattr(select, "LEAST_QUERIES", len(STARTS))
    select._kept.clear()
    yield
    select._kept.clear()


def arguments(queries=6, longest=70, scale=None):
    q = torch.randn(queries, HEADS, DIM).to(torch.float8_e4m3fn)
    starts, ends = int32(STARTS[:queries]), int32(ENDS[:queries])
    return (q, scale), index_keys(130), torch.randn(queries, HEADS), starts, ends, longest


def choose(topk, logits, starts, ends, k=TOPK):
    """Call top-k as vLLM does: a row's first column is the first key that the query sees."""
    buffer = torch.full((len(starts) + 2, k + 4), -7, dtype=torch.int32)
    out, counts = buffer[1:-1, :k], ends - starts
    topk(logits, torch.zeros_like(counts), counts, out, logits.shape[0], logits.stride(0), logits.stride(1), k)
    return buffer


def test_the_best_keys_of_each_query_are_selected():
    (q, _), (k, k_scale), weights, starts, ends, _ = given = arguments()
    logits = select.mqa_logits(never)(*given)
    assert logits.dtype == torch.float32 and logits.shape == (len(q), 1)
    buffer = choose(select.topk_prefill(never), logits, starts, ends)
    scores = index_scores(q, k, k_scale, weights)
    for row, start, end, expected in zip(buffer[1:-1], STARTS, ENDS, scores):
        assert sorted(row[:TOPK].tolist()) == sorted(selected(expected[start:end], TOPK))
    buffer[1:-1, :TOPK] = -7
    assert (buffer == -7).all()


@pytest.mark.parametrize(
    "short", [{"longest": 69}, {"queries": len(STARTS) - 1}, {"scale": torch.ones(1, dtype=torch.int32)}]
)
def test_short_contexts_and_other_queries_are_left_to_the_original(short):
    given, original = arguments(**short), Original()
    assert select.mqa_logits(original)(*given) == "vLLM's own"
    original.assert_called_once(given)


def test_only_the_latest_placeholder_is_used_and_only_once():
    calls = []
    topk = select.topk_prefill(lambda *given: calls.append(given))
    first, latest, other = (
        *(select.mqa_logits(never)(*arguments()) for _ in range(2)),
        torch.randn(len(STARTS), 70),
    )
    for logits in (first, other, latest, latest):
        choose(topk, logits, int32(STARTS), int32(ENDS))
    assert [id(given[0]) for given in calls] == [id(first), id(other), id(latest)]
    assert calls[0][4:] == (len(STARTS), 1, 1, TOPK)
