"""`indexer_warmup_attention` on the CPU: chunks, padding, and the keys of absorbed attention."""

import math

import pytest
import torch

from dsa.ops.training import _packed_attention, _warmup_sum

BF16 = torch.bfloat16


@pytest.mark.parametrize(("count", "budget"), [(1, 0), (7, 30), (68, 100), (68, 10**9), (68, 333)])
def test_chunks_are_even_and_within_the_budget(count, budget):
    plan = _warmup_sum.Plan(torch.zeros(count, 8), torch.zeros(count + 1), 1)
    chunks = plan.chunks(10, budget)
    sizes = [c.stop - c.start for c in chunks]
    assert [c.start for c in chunks] == [sum(sizes[:i]) for i in range(len(sizes))] and sum(sizes) == count
    assert max(sizes) <= max(1, budget // 10) and max(sizes) - sizes[-1] < len(sizes)
    assert all(size == sizes[0] for size in sizes[:-1])


@pytest.mark.parametrize("budget", [10, 70, 333, 610, 1220, 10**9])
@pytest.mark.parametrize("count", [1, 5, 68, 272])
@pytest.mark.parametrize(("tiles", "workers"), [(16, 132), (1, 7), (64, 3), (300, 132)])
def test_chunks_are_whole_turns_of_tiles(count, budget, tiles, workers):
    plan = _warmup_sum.Plan(torch.zeros(count, 8), torch.zeros(count + 1), tiles)
    even, chunks = plan.chunks(10, budget), plan.chunks(10, budget, workers)
    sizes = [c.stop - c.start for c in chunks]
    assert [c.start for c in chunks] == [sum(sizes[:i]) for i in range(len(sizes))] and sum(sizes) == count
    assert min(sizes) > 0 and max(sizes) <= max(1, budget // 10) and len(chunks) >= len(even)
    turn = 2 * workers / (tiles + 1)
    if len(chunks) > 1 and chunks != even:
        assert len(set(sizes[:-1])) == 1 and sizes[0] == int(math.ceil(sizes[0] / turn) * turn)


def test_two_sequences_of_16_tiles_take_no_turn_more_than_their_tiles():
    """Four sequences of 2048 tokens have 544 score tiles, or 5 waves on 132 SMs. Two equal chunks of 272 would take 3
    waves each. The chunks of this plan take 2 and 3."""
    sizes = [c.stop - c.start for c in _warmup_sum.Plan(torch.zeros(68, 8), torch.zeros(69), 16).chunks(10, 600, 132)]
    tiles = [i % 16 + 1 for i in range(64)] + [0] * 4
    assert [-(-sum(tiles[:31]) // 132), -(-sum(tiles[31:]) // 132)] == [2, 3] and sizes == [31, 37]


def test_a_plan_of_no_work():
    plan = _warmup_sum.Plan(torch.ones(3, 8, dtype=torch.int32), torch.arange(4, dtype=torch.int32), 2)
    assert torch.equal(plan.only_if(torch.tensor(True)).q_tiles, plan.q_tiles)
    nothing = plan.only_if(torch.tensor(False))
    assert not nothing.q_tiles.any() and not nothing.key_tiles.any()
    assert nothing.q_tiles.dtype == nothing.key_tiles.dtype == torch.int32


def test_index_heads_are_padded_with_heads_of_no_weight():
    q, k, w = torch.randn(5, 20, 64).bfloat16(), torch.randn(7, 64).bfloat16(), torch.randn(5, 20).bfloat16()
    padded = _warmup_sum.Indexer.of(q, k, w)
    assert padded.q.shape == (5, 32, 64) and padded.w.shape == (5, 32) and padded.w.dtype == torch.float32
    assert torch.equal(padded.q[:, :20], q) and torch.equal(padded.w[:, :20], w.float()) and not padded.w[:, 20:].any()
    assert padded.k is k and _warmup_sum.Indexer.of(padded.q, k, padded.w).q is padded.q


@pytest.mark.parametrize("causal", [True, False])
def test_absorbed_attention_selects_what_a_query_sees(monkeypatch, causal):
    monkeypatch.setattr(_packed_attention, "MOST_INDICES", 30)
    lengths = [(3, 5), (0, 2), (4, 2), (1, 1), (2, 0)]
    bounds = [torch.tensor([1, *side]).cumsum(0).int() for side in zip(*lengths)]
    queries = int(bounds[0][-1]) + 2  # the first query and the last two belong to no sequence
    found = {}
    for rows, indices, visible in _packed_attention._selections((*bounds, 4, 5), queries, causal):
        assert indices.shape == (rows.stop - rows.start, 1, 5) and indices.dtype == visible.dtype == torch.int32
        for t, picks, count in zip(range(rows.start, rows.stop), indices[:, 0].tolist(), visible.tolist()):
            found[t] = picks[:count]
    expected, t, first = {0: []}, 1, 1
    for n, m in lengths:
        for i in range(n):
            expected[t + i] = list(range(first, first + (max(0, m - n + i + 1) if causal else m)))
        t, first = t + n, first + m
    assert found == expected | {t: [], t + 1: []}


@pytest.mark.parametrize("causal", [True, False])
def test_without_sequences_no_query_selects_a_key(causal):
    nothing = torch.zeros(1, dtype=torch.int32)
    (selection,) = _packed_attention._selections((nothing, nothing, 4, 5), 3, causal)
    assert selection[0] == slice(0, 3) and selection[1].shape == (3, 1, 5) and selection[2].tolist() == [0, 0, 0]


@pytest.mark.parametrize("deterministic", [True, False])
def test_absorbed_gradients_are_deterministic_as_pytorch_is_told(monkeypatch, deterministic):
    """The last argument of `sparse_gradients`, `deterministic`, must be PyTorch's setting."""
    asked = []

    def gradients(q, kv, indices, *rest):
        asked.append(rest[-1])
        return torch.zeros_like(q), torch.zeros_like(kv), None

    monkeypatch.setattr(_packed_attention, "sparse_gradients", gradients)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    q, k, out = (torch.zeros(3, n, d, dtype=BF16) for n, d in ((2, 576), (1, 576), (2, 512)))
    bounds = [torch.tensor([0, 3], dtype=torch.int32)] * 2
    _packed_attention.attention_backward(out, q, k, k[..., :512], out, torch.zeros(2, 3), (*bounds, 3, 3), 0.1, True)
    assert asked == [deterministic]


@pytest.mark.parametrize(("queries", "keys", "batch"), [(3, 0, 1), (0, 3, 1), (3, 3, 0)])
def test_attention_without_queries_keys_or_sequences_has_gradients_of_zero(queries, keys, batch):
    q, k, v, out = (
        torch.randn(n, 2, d, dtype=BF16) for n, d in zip((queries, keys, keys, queries), (192, 192, 128, 128))
    )
    bounds = [torch.tensor([0, n][: batch + 1], dtype=torch.int32) for n in (queries, keys)]
    lse = torch.full((2, queries), torch.inf)
    grads = _packed_attention.attention_backward(out, q, k, v, out, lse, (*bounds, queries, keys), 0.125, True)
    for grad, x in zip(grads, (q, k, v)):
        assert grad.shape == x.shape and not grad.any()


def test_flash_attention_is_given_rows_at_16_bytes(monkeypatch):
    given = []

    def flash(grad, q, k, v, *_, **__):
        given.extend((grad, q, k, v))
        return q, k, v

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash)
    monkeypatch.setattr(_packed_attention, "fill_uncovered", lambda *_, **__: None)
    odd = torch.randn(5, 2, 65, dtype=BF16)[..., 1:]
    same = torch.randn(5, 2, 64, dtype=BF16)
    bounds = [torch.tensor([0, 5], dtype=torch.int32)] * 2
    _packed_attention.attention_backward(
        odd, odd, odd.mT.contiguous().mT, same, same, torch.zeros(2, 5), (*bounds, 5, 5), 0.125, True
    )
    for x, original in zip(given, (odd, odd, odd, same)):
        assert torch.equal(x, original) and x.stride()[1:] == (64, 1) and x.data_ptr() % 16 == 0


@pytest.mark.parametrize(
    ("heads", "key_heads", "most", "expected"),
    [(6, 6, 9, [6]), (6, 6, 4, [4, 2]), (6, 2, 4, [3, 3]), (6, 1, 5, [3, 3]), (6, 2, 1, [1] * 6), (6, 3, 0, [1] * 6)],
)
def test_flash_attention_is_given_as_many_heads_as_it_can_count(monkeypatch, heads, key_heads, most, expected):
    q, grad = (torch.randn(4, heads, 64, dtype=BF16) for _ in range(2))
    k, v = (torch.randn(4, key_heads, 64, dtype=BF16) for _ in range(2))
    given = []

    def flash(grad, q, k, v, out, lse, *_, **__):
        """Return gradients that depend on out and lse, so that the test notices wrong slices of heads."""
        given.append(q.shape[1])
        grad = grad.float() * out.float() * lse.T[..., None]
        q, k, v = (x.float().requires_grad_() for x in (q, k, v))
        wide = [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v)]
        return tuple(x.to(BF16) for x in torch.autograd.grad((grad * q * wide[0] * wide[1]).sum(), (q, k, v)))

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", flash)
    monkeypatch.setattr(_packed_attention, "fill_uncovered", lambda *_, **__: None)
    monkeypatch.setattr(_packed_attention, "MOST_NUMBERS", most * (4 + 2 * 128) * 64 + 1)
    bounds = [torch.tensor([0, 4], dtype=torch.int32)] * 2
    out, lse = torch.rand(4, heads, 64).bfloat16() + 0.5, torch.rand(heads, 4) + 0.5
    got = _packed_attention.attention_backward(grad, q, k, v, out, lse, (*bounds, 4, 4), 0.125, True)
    assert given == expected
    for x, y in zip(got, flash(grad, q, k, v, out, lse)):
        torch.testing.assert_close(x, y, atol=0.05, rtol=2e-2)
