"""Warm-up and sparse stage, with gradients."""

import torch

import dsa
from dsa.self_test.comparisons import D_V, D, H, check_attention, check_gradient, check_lse
from dsa.testing import assert_close


def indexer_warmup_attention(device: str) -> None:
    """Two sequences, one of them with more keys than queries: each query's row by the definitions, in float64."""
    shapes = (5, 4, 64), (7, 2, 64), (7, 2, 64), (5, 8, 64), (7, 64)
    q, k, v, q_idx, k_idx = (torch.randn(*shape, device=device).bfloat16() for shape in shapes)
    w_idx = torch.randn(5, 8, device=device) / 8
    bounds = [torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 3, 5), (0, 5, 7))]
    learned = [x.requires_grad_() for x in (q_idx, k_idx, w_idx)]
    out, lse, kl = dsa.indexer_warmup_attention(q, k, v, *learned, *bounds, 3, 5, 0.125)
    got = torch.autograd.grad(kl.sum(), learned)
    exact = [x.detach().double().requires_grad_() for x in learned]
    losses = []
    for t, keys in enumerate([range(3), range(4), range(5), range(5, 6), range(5, 7)]):
        rows = torch.tensor(keys, device=device)
        logits = 0.125 * torch.einsum("hd,shd->hs", q[t].double(), k[rows].double().repeat_interleave(2, 1))
        assert_close("lse", lse[:, t], logits.logsumexp(-1), abs_tol=2e-5, rel_tol=1e-5)
        values = v[rows].double().repeat_interleave(2, 1)
        expected = torch.einsum("hs,shd->hd", logits.softmax(-1), values)
        assert_close("out", out[t], expected, abs_tol=1e-2, rel_tol=2e-2, cos_tol=2e-5)
        scores = (exact[2][t, :, None] * (exact[0][t] @ exact[1][rows].T).relu()).sum(0)
        p = logits.softmax(-1).mean(0)
        losses.append((p * (p.log() - scores.log_softmax(0))).sum())
    expected = torch.stack(losses)
    assert_close("kl", kl, expected.detach(), abs_tol=2e-5, rel_tol=1e-3)
    for name, x, y in zip(("dq_idx", "dk_idx", "dw_idx"), got, torch.autograd.grad(expected.sum(), exact)):
        check_gradient(name, x, y)


def indexer_topk(device: str) -> None:
    """Two sequences, causal; scores of small whole numbers, many of them equal: each query's keys by the definition."""
    q, k = (torch.randint(-1, 2, shape, device=device).bfloat16() for shape in ((9, 8, 64), (40, 64)))
    w = torch.randint(-4, 5, (9, 8), device=device) / 8
    bounds = [torch.tensor(x, dtype=torch.int32, device=device) for x in ((0, 5, 9), (0, 30, 40))]
    topk_indices = dsa.indexer_topk(q, k, w, 12, *bounds, 5, 30)[:, 0].tolist()
    for t in range(9):
        first, seen = (0, 26 + t) if t < 5 else (30, 2 + t)
        scores = (w[t, :, None] * (q[t].float() @ k[first : first + seen].float().T).relu()).sum(0).tolist()
        best = sorted(sorted(range(seen), key=lambda s, of=scores: (-of[s], s))[:12])
        expected = [first + s for s in best] + [-1] * (12 - len(best))
        if topk_indices[t] != expected:
            raise AssertionError(f"query {t}: selected {topk_indices[t]}, expected {expected}")


def sparse_indexer_loss(device: str) -> None:
    """A query of two keys, one of them twice, beside what is none, and the gradients, by the definitions in float64."""
    q, kv = torch.randn(1, H, D, device=device).bfloat16(), torch.randn(9, 1, D, device=device).bfloat16()
    q_idx, k_idx = torch.randn(1, 8, 64, device=device).bfloat16(), torch.randn(9, 64, device=device).bfloat16()
    w, scale = torch.randn(1, 8, device=device) / 8, 8 * D**-0.5
    topk_indices = torch.tensor([[[6, -1, 5, 9, 5]]], dtype=torch.int32, device=device)
    learned = [x.requires_grad_() for x in (q_idx, k_idx, w)]
    kl = dsa.sparse_indexer_loss(q, kv, *learned, topk_indices, scale)
    got = torch.autograd.grad(kl.sum(), learned)
    rows = torch.tensor([6, 5, 5], device=device)
    p = (scale * q[0].double() @ kv[rows, 0].double().T).softmax(-1).mean(0)
    exact = [x.detach().double().requires_grad_() for x in learned]
    scores = exact[2][0] @ (exact[0][0] @ exact[1][rows].T).relu()
    expected = (p * (p.log() - scores.log_softmax(0))).sum()
    # Of a single number, which may be near 0, the cosine says nothing more.
    assert_close("sparse kl", kl[0], expected.detach(), abs_tol=2e-5, rel_tol=1e-3, cos_tol=1.0)
    for name, x, y in zip(("dq_idx", "dk_idx", "dw_idx"), got, torch.autograd.grad(expected, exact)):
        check_gradient(name, x, y)


def sparse_mla_attention(device: str) -> None:
    """Results and gradients of two queries, one of which has no keys, by the definition in float64."""
    q, kv = torch.randn(2, H, D, device=device).bfloat16(), torch.randn(90, 1, D, device=device).bfloat16()
    topk_indices = torch.full((2, 1, 70), -1, dtype=torch.int32, device=device)
    topk_indices[0, 0, :50] = torch.randperm(90, device=device)[:50]
    sink, leaves = torch.full((H,), 4.0, device=device), [x.requires_grad_() for x in (q, kv)]
    sink.requires_grad_()
    out, lse = dsa.sparse_mla_attention(*leaves, topk_indices, D**-0.5, D_V, sink)
    dout = torch.randn_like(out)
    dq, dkv, dsink = torch.autograd.grad(out, (*leaves, sink), dout)
    wide = [x.detach().double().requires_grad_() for x in (*leaves, sink)]
    keys = wide[1][topk_indices[0, 0, :50].long(), 0]
    logits = wide[0][0] @ keys.T * D**-0.5
    p = torch.cat((logits, wide[2][:, None]), 1).softmax(-1)[:, :50]
    expected = p @ keys[:, :D_V]
    gradients = torch.autograd.grad(expected, wide, dout[0].double())
    check_attention("out", out[0], expected, p @ keys[:, :D_V].abs(), 7e-6)
    check_lse("lse", lse[:, 0], logits.logsumexp(-1))
    for name, got, true in zip(("dq", "dkv", "dsink"), (dq, dkv, dsink), gradients):
        check_gradient(name, got, true)
    if any(x.ne(0).any() for x in (out[1], dq[1])) or lse[:, 1].ne(torch.inf).any():
        raise AssertionError("not zeros and an lse of infinity without keys")
