"""The kernels of the per-head warm-up loss against the reference in float64, on the GPU."""

import pytest
import torch

from dsa.ops.training import _warmup_per_head as bridge
from dsa.ops.training._warmup_per_head import per_head_backward, per_head_forward
from dsa.reference.training import indexer_warmup_attention as reference
from dsa.testing import poison_free_memory

DIMS = [(64, 64), (64, 128), (128, 64), (128, 128), (192, 64), (192, 128)]
NAMES = "kl", "dq_idx", "dk_idx", "dw"


def make_q_tiles(bounds_q, bounds_k, causal):
    """As the plan kernel makes them: two unused q tiles at the end."""
    rows = []
    for b, (first_q, end_q, first_k, end_k) in enumerate(zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:])):
        m, n = end_q - first_q, end_k - first_k
        for i in range(0, m, 128):
            count, seen, step = min(128, m - i), n - m + i + 1 if causal else n, int(causal)
            last = min(max(seen + step * (count - 1), 0), n)
            rows.append([first_q + i, count, first_k, n, seen, step, -(-last // 128), b])
    rows += [[0] * 7 + [-1]] * 2
    return torch.tensor(rows, dtype=torch.int32, device="cuda")


class Case:
    def __init__(self, lengths_q, lengths_k=None, heads=4, key_heads=1, dims=(128, 64), causal=True, seed=0):
        torch.manual_seed(seed)
        lengths_k = lengths_q if lengths_k is None else lengths_k
        self.causal = causal
        self.bounds_q, self.bounds_k = ([sum(x[:i]) for i in range(len(x) + 1)] for x in (lengths_q, lengths_k))
        tokens, keys, (dim, index_dim) = self.bounds_q[-1], self.bounds_k[-1], dims

        def normal(*shape):
            return torch.randn(*shape, device="cuda")

        self.q, self.k = normal(tokens, heads, dim).bfloat16(), normal(keys, key_heads, dim).bfloat16()
        self.q_idx, self.k_idx = normal(tokens, heads, index_dim).bfloat16(), normal(keys, index_dim).bfloat16()
        self.w = normal(tokens, heads) * index_dim**-0.5
        self.w[::7] = 0.0
        self.g = normal(tokens, heads) / max(tokens, 1)
        self.scale = dim**-0.5
        self.q_tiles = make_q_tiles(self.bounds_q, self.bounds_k, causal)
        self.cu_q, self.cu_k = (
            torch.tensor(x, dtype=torch.int32, device="cuda") for x in (self.bounds_q, self.bounds_k)
        )

    def run(self, lse):
        poison_free_memory(mebibytes=256)
        inputs = self.q, self.k, self.q_idx, self.k_idx, self.w, lse
        kl, lse_idx = per_head_forward(*inputs, self.q_tiles, self.scale)
        poison_free_memory(mebibytes=256)
        bounds = self.cu_q, self.cu_k
        return kl, *per_head_backward(*inputs, lse_idx, self.g, self.q_tiles, *bounds, self.scale)

    def autograd(self, dtype):
        """kl and gradients by the reference, or for bf16 by its formula in that dtype; and the attention's lse."""
        leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in (self.q_idx, self.k_idx, self.w)]
        q, k = self.q.to(dtype), self.k.to(dtype)
        if dtype == torch.bfloat16:
            kl, lse = self.formula(q, k, *leaves), None
        else:
            longest = max(len(self.q), len(self.k))
            bounds = self.cu_q, self.cu_k, longest, longest
            _, lse, kl = reference.indexer_warmup_attention(
                q, k, k, *leaves, *bounds, self.scale, self.causal, "per_head"
            )
        return lse, kl.detach(), *torch.autograd.grad((kl * self.g.to(kl.dtype)).sum(), leaves)

    def formula(self, q, k, q_idx, k_idx, w):
        kls = []
        for a, b, c, d in zip(self.bounds_q, self.bounds_q[1:], self.bounds_k, self.bounds_k[1:]):
            m, n = b - a, d - c
            visible = torch.ones(m, n, dtype=torch.bool, device="cuda")
            visible = visible.tril(n - m) if self.causal else visible
            hidden = ~visible & visible.any(-1, keepdim=True)
            own = k[c:d].repeat_interleave(q.shape[1] // k.shape[1], 1)
            main = (self.scale * torch.einsum("thd,shd->hts", q[a:b], own)).masked_fill(hidden, -torch.inf)
            index = torch.relu(torch.einsum("thd,sd->hts", q_idx[a:b], k_idx[c:d])) * w[a:b].T[..., None]
            log_r = index.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(~visible, 0.0)
            p = main.softmax(-1).masked_fill(~visible, 0.0)
            kls.append((torch.special.xlogy(p, p) - p * log_r).sum(-1).T)
        return torch.cat(kls)


def error(got, expected):
    if expected.norm() == 0:
        return float(got.double().norm())
    return float((got.double() - expected).norm() / expected.norm())


def check(case, record_error=None):
    lse, *expected = case.autograd(torch.float64)
    got = case.run(lse.float())
    rough = case.autograd(torch.bfloat16)[1:]
    for name, mine, theirs, right in zip(NAMES, got, rough, expected):
        assert mine.shape == right.shape and not mine.isnan().any(), name
        own, limit = error(mine, right), 2 * error(theirs, right)
        print(f"{name}: {own:.2e}, bf16 autograd {limit / 2:.2e}")
        assert own <= max(limit, 1e-6) and own < 2e-2, (name, own, limit)
        if record_error:
            record_error(own)
    return got


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_dims(dims, causal, record_error):
    check(Case([200, 1, 64, 513], heads=4, key_heads=2, dims=dims, causal=causal), record_error)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        ([1], [1]),
        ([127], [127]),
        ([128], [128]),
        ([129], [129]),
        ([64, 65, 63], [64, 65, 63]),
        ([1, 0, 130, 300, 64, 3], [1, 5, 130, 333, 700, 0]),
        ([300, 2, 0], [70, 1, 9]),
        ([1000], [100]),
        ([5, 256], [1000, 384]),
    ],
)
def test_lengths(queries, keys, causal, record_error):
    check(Case(queries, keys, causal=causal), record_error)


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (3, 3), (16, 1), (64, 8), (128, 128)])
def test_heads(heads, key_heads, record_error):
    check(Case([150, 33], heads=heads, key_heads=key_heads), record_error)


def test_mass_on_one_key(record_error):
    """The attention's: kl is large. And the indexer's: powers of scores in the hundreds."""
    case = Case([300, 40])
    case.q[:, :, 0], case.k[:, :, 0] = 40.0, 0.0
    case.k[0, :, 0] = case.k[300, :, 0] = 60.0
    check(case, record_error)
    case.q_idx[:, :, 0], case.k_idx[:, 0] = 8.0, 0.0
    case.k_idx[0, 0] = case.k_idx[300, 0] = 100.0
    check(case, record_error)


def test_scores_that_grow(record_error):
    """Tiles come from the last to the first: every one's scores are far above those of all before it."""
    case = Case([700, 300])
    for first, count in ((0, 700), (700, 300)):
        growth = torch.linspace(60.0, 1.0, count, device="cuda")[:, None]
        case.k_idx[first : first + count] = (case.k_idx[first : first + count] * growth).bfloat16()
    case.w = case.w.abs() * 4
    check(case, record_error)


def test_exact_zeros():
    """relu has no gradient at 0: not of orthogonal rows, nor of rows of zeros."""
    case = Case([200])
    case.q_idx[:, :, 32:], case.k_idx[:, :32] = 0.0, 0.0
    lse, *expected = case.autograd(torch.float64)
    for mine, right in zip(case.run(lse.float())[1:], expected[1:]):
        assert (right == 0).all() and (mine == 0).all()


def test_large_is_always_the_same(record_error, monkeypatch):
    """Whether many q tiles of a head are under way at the same time, or few."""
    case = Case([2048, 2048], heads=64)
    lse = torch.empty(64, 4096, device="cuda")
    visible = torch.ones(2048, 2048, dtype=torch.bool, device="cuda").tril()
    kl, index_dk = torch.zeros(4096, 64, device="cuda"), torch.zeros(4096, 64, device="cuda")
    dq, dw = torch.zeros(4096, 64, 64, device="cuda"), torch.zeros(4096, 64, device="cuda")
    for b in range(2):
        own = slice(2048 * b, 2048 * (b + 1))
        for h in range(64):
            main = case.scale * case.q[own, h].float() @ case.k[own, 0].float().T
            lse[h, own] = main.masked_fill(~visible, -torch.inf).logsumexp(-1)
            x = case.q_idx[own, h].float() @ case.k_idx[own].float().T
            scores = (x.relu() * case.w[own, h, None]).masked_fill(~visible, -torch.inf)
            log_r, log_p = scores.log_softmax(-1), main - lse[h, own, None]
            p = log_p.exp().masked_fill(~visible, 0.0)
            kl[own, h] = (p * (log_p - log_r)).masked_fill(~visible, 0.0).sum(-1)
            d = case.g[own, h, None] * (log_r.exp() - p) * (x > 0)
            dw[own, h] = (d * x).sum(-1)
            d *= case.w[own, h, None]
            dq[own, h] = d @ case.k_idx[own].float()
            index_dk[own] += d.T @ case.q_idx[own, h].float()
    first = case.run(lse)
    for name, mine, right in zip(NAMES, first, (kl, dq, index_dk, dw)):
        own = error(mine, right)
        print(f"{name}: {own:.2e}")
        record_error(own)
        assert own < 1e-2, name
    for together in (4, 64):
        monkeypatch.setattr(bridge, "LEAST_TOGETHER", together)
        monkeypatch.setattr(bridge, "MOST_TOGETHER", together)
        for _ in range(5):
            for mine, again in zip(first, case.run(lse)):
                assert torch.equal(mine, again)


def test_graph():
    case = Case([300, 20])
    lse = case.autograd(torch.float64)[0].float()
    expected = case.run(lse)
    inputs = case.q, case.k, case.q_idx, case.k_idx, case.w, lse
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kl, lse_idx = per_head_forward(*inputs, case.q_tiles, case.scale)
        got = kl, *per_head_backward(*inputs, lse_idx, case.g, case.q_tiles, case.cu_q, case.cu_k, case.scale)
    for _ in range(3):
        for x in got:
            x.fill_(torch.nan)
        graph.replay()
        for mine, again in zip(got, expected):
            assert torch.equal(mine, again)


def test_empty():
    for lengths_q, lengths_k in (([0], [5]), ([5], [0])):
        case = Case(lengths_q, lengths_k)
        lse = torch.full((4, sum(lengths_q)), torch.inf, device="cuda")
        assert all((x == 0).all() for x in case.run(lse))
