"""The warm-up's kernels against the reference in float64, on the GPU: attention, loss, and all gradients."""

import pytest
import torch

import dsa
from dsa.ops.training import _packed_attention, _warmup_sum
from dsa.reference.training import indexer_warmup_attention as reference
from dsa.testing import poison_free_memory
from tests.gpu.attention import starts
from tests.gpu.op_checks import assert_runs_have_the_same_bits, assert_same_bits, replays

LENGTHS = [(300, 300), (0, 5), (513, 513), (1, 1), (128, 128), (5, 200), (300, 3), (7, 0), (129, 129)]
INDEXER = "q_idx", "k_idx", "w_idx"
MOST_ERROR = 1e-2  # of gradients, relative


class Case:
    """Packed sequences, what is computed of them, and float64's answer."""

    def __init__(self, lengths, heads=4, key_heads=1, dims=(128, 128), index=(8, 64), causal=True):
        def normal(*shape):
            return torch.randn(*shape, device="cuda")

        bounds = [starts(side) for side in zip(*lengths)]
        queries, keys = (int(x[-1]) for x in bounds)
        (dim, value_dim), (index_heads, index_dim) = dims, index
        self.q, self.k = normal(queries, heads, dim).bfloat16(), normal(keys, key_heads, dim).bfloat16()
        self.v = self.k[..., :value_dim] if dim == 576 else normal(keys, key_heads, value_dim).bfloat16()
        self.q_idx = (normal(queries, index_heads, index_dim) * index_dim**-0.25).bfloat16()
        self.k_idx = (normal(keys, index_dim) * index_dim**-0.25).bfloat16()
        self.w_idx = normal(queries, index_heads)  # of both signs
        self.w_idx *= index_heads**-0.5
        self.w_idx[::7] = 0.0
        longest = [max(side) for side in zip(*lengths)]
        self.rest = (*bounds, *longest, dim**-0.5, causal)
        self.per_token = torch.rand(queries, device="cuda") / queries

    def inputs(self):
        return self.q, self.k, self.v, self.q_idx, self.k_idx, self.w_idx

    def run(self, per_token=None):
        """out, lse, kl and the indexer's gradients."""
        leaves = [x.detach().requires_grad_() for x in self.inputs()[3:]]
        poison_free_memory(mebibytes=256)
        out, lse, kl = dsa.indexer_warmup_attention(*self.inputs()[:3], *leaves, *self.rest)
        poison_free_memory(mebibytes=256)
        weights = self.per_token if per_token is None else per_token
        return out, lse, kl.detach(), *torch.autograd.grad((kl * weights).sum(), leaves)

    def expected(self, dtype=torch.float64):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in self.inputs()[3:]]
        q, k, v = (x.to(dtype) for x in self.inputs()[:3])
        if dtype == torch.bfloat16:
            out, lse, kl = None, None, self.formula(q, k, *leaves)
        else:
            out, lse, kl = reference.indexer_warmup_attention(q, k, v, *leaves, *self.rest)
        return out, lse, kl.detach(), *torch.autograd.grad((kl * self.per_token.to(kl.dtype)).sum(), leaves)

    def formula(self, q, k, q_idx, k_idx, w_idx):
        """The loss with every step in the inputs' dtype: what PyTorch makes of it without care."""
        (bounds_q, bounds_k), (_, _, scale, causal) = (x.tolist() for x in self.rest[:2]), self.rest[2:]
        kls = []
        for a, b, c, d in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:]):
            hidden = torch.zeros(b - a, d - c, dtype=torch.bool, device="cuda")
            if causal:
                hidden = ~(~hidden).tril(d - c - (b - a))
            unseen = hidden & (~hidden).any(-1, keepdim=True)
            own = k[c:d].repeat_interleave(q.shape[1] // k.shape[1], 1)
            logits = scale * torch.einsum("thd,shd->hts", q[a:b], own)
            p = logits.masked_fill(unseen, -torch.inf).softmax(-1)
            scores = torch.relu(torch.einsum("thd,sd->hts", q_idx[a:b], k_idx[c:d])) * w_idx[a:b].T[..., None]
            p, scores = p.mean(0), scores.sum(0)
            log_q = scores.masked_fill(unseen, -torch.inf).log_softmax(-1).masked_fill(hidden, 0.0)
            kls.append(((torch.special.xlogy(p, p) - p * log_q) * ~hidden).sum(-1).movedim(-1, 0))
        return torch.cat(kls)


def relative(got, expected):
    """The error's norm, of gradients that are zero itself."""
    norm, error = expected.double().norm(), (got.double() - expected.double()).norm()
    return float(error / norm if norm else error)


def check(case, record_error=None):
    (out, lse, kl, *grads), (e_out, e_lse, e_kl, *e_grads) = case.run(), case.expected()
    assert not out.isnan().any() and (out.numel() == 0 or relative(out, e_out) < 4e-3)
    torch.testing.assert_close(lse.double(), e_lse, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(kl.double(), e_kl, atol=2e-5, rtol=1e-4)
    for name, got, expected, rough in zip(
        ("kl", *INDEXER), (kl, *grads), (e_kl, *e_grads), case.expected(torch.bfloat16)[2:]
    ):
        error, most = relative(got, expected), max(2 * relative(rough, expected), 1e-6)
        assert got.shape == expected.shape and error < MOST_ERROR, f"{name}: relative error {error}"
        assert error <= most, f"{name}: {error} is not what bf16 can do"
        if record_error:
            record_error(error)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("index", [(8, 64), (16, 128), (32, 64), (64, 64), (64, 128), (3, 64), (48, 128)])
def test_index_heads(index, causal, record_error):
    check(Case(LENGTHS, index=index, causal=causal), record_error)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (576, 512)])
@pytest.mark.parametrize("heads, key_heads", [(1, 1), (4, 1), (6, 3), (5, 5), (64, 1)])
def test_heads(dims, heads, key_heads, record_error):
    if dims[0] == 576 and key_heads > 1:
        pytest.skip("latents are one head")
    check(Case(LENGTHS[2:6], heads, key_heads, dims), record_error)


def test_many_sequences():
    check(Case([(1 + i % 5, 1 + i % 7) for i in range(700)]))


def test_chunks(monkeypatch):
    """A workspace of three q tiles gives the same bits."""
    case = Case(LENGTHS)
    whole = case.run()
    monkeypatch.setattr(_warmup_sum, "LEAST_WORKSPACE", 3 * 5 * 128 * 128 * 5)
    monkeypatch.setattr(_warmup_sum, "SHARE", 0)
    got = case.run()
    assert_same_bits((*got[:4], got[5]), (*whole[:4], whole[5]))
    assert relative(got[4], whole[4]) < 1e-3


def test_equal_weights():
    """The gradients that were kept with the loss, and those computed again, are the same."""
    case = Case(LENGTHS)
    tokens = len(case.q)
    case.per_token = torch.full((tokens,), 1 / tokens, device="cuda")
    check(case)
    nearly = case.per_token.clone()
    nearly[0] *= 1.0000002
    same = torch.ones(1, device="cuda").expand(tokens) / tokens
    for weights in (nearly, torch.tensor(1 / tokens, device="cuda").expand(tokens), same):
        for got, again in zip(case.run()[3:], case.run(weights)[3:]):
            assert relative(got, again) < 4e-3


def test_tokens_left_out():
    """Weights of zero: what a mask over tokens makes of the loss."""
    case = Case([(200, 200), (150, 150)])
    case.per_token[::2] = 0.0
    case.per_token[200:] = 0.0
    grads = case.run()[3:]
    assert not grads[0][::2].any() and not grads[0][200:].any() and not grads[1][200:].any()
    check(case)


def test_all_mass_on_one_key():
    case = Case([(300, 300)])
    case.q[:] = 0.0
    case.q[..., 0], case.k[..., 0], case.k[0, :, 0] = 100.0, -100.0, 100.0
    check(case)


@pytest.mark.parametrize(
    ("dims", "key_heads", "together"),
    [
        *(((64, 64), 1, 4), ((128, 128), 1, 4), ((192, 128), 1, 4), ((576, 512), 1, 4)),
        *(((192, 128), 4, 3), ((128, 128), 2, 3), ((64, 64), 1, 3)),
    ],
)
def test_attention_gradients(monkeypatch, dims, key_heads, together):
    """In bf16 by PyTorch's flash attention, of all heads or some at a time, or the sparse one's backward: beside
    float64."""
    case = Case([(200, 200), (60, 130), (1, 1)], 4, key_heads, dims)
    if together < 4:
        monkeypatch.setattr(_packed_attention, "MOST_NUMBERS", (together + 1) * (len(case.q) + 512) * dims[0])
    leaves, exact = (
        [x.detach().to(d).requires_grad_() for x in (case.q, case.k)] for d in (torch.bfloat16, torch.float64)
    )
    grad = torch.randn(len(case.q), 4, dims[1], device="cuda").bfloat16()
    got, expected = [], []
    for (q, k), result, d in ((leaves, got, torch.bfloat16), (exact, expected, torch.float64)):
        v = k[..., : dims[1]] if dims[0] == 576 else case.v.detach().to(d).requires_grad_()
        function = dsa if d == torch.bfloat16 else reference
        indexer = [x.to(d) for x in case.inputs()[3:]] if d == torch.float64 else case.inputs()[3:]
        out, _, _ = function.indexer_warmup_attention(q, k, v, *indexer, *case.rest)
        result += torch.autograd.grad((out * grad.to(d)).sum(), [q, k] + ([v] if v.is_leaf else []))
    for x, y in zip(got, expected):
        assert relative(x, y) < 2e-2


def test_strides():
    """Rows at no multiple of 16 bytes, and heads that share their rows."""
    case = Case([(200, 200), (60, 130)], 4, 4, index=(4, 64))
    case.k, case.q_idx = case.k[:, :1].expand(case.k.shape), case.q_idx[:, :1].expand(case.q_idx.shape)
    odd = [torch.cat([x[..., :1], x], -1)[..., 1:] for x in case.inputs()]
    shared = [case.q, case.k, odd[2], case.q_idx, odd[4], case.w_idx]
    contiguous, results = [x.contiguous() for x in case.inputs()], []
    for inputs in (contiguous, odd, shared):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, lse, kl = dsa.indexer_warmup_attention(*leaves, *case.rest)
        grads = torch.autograd.grad(out.float().sum() + (kl * case.per_token).sum(), leaves)
        results.append((out, lse, kl, *grads))
    for result in results[1:]:
        for x, y in zip(result, results[0]):
            assert relative(x, y) < 4e-3


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (576, 512)])
def test_rows_of_no_sequence_are_empty(dims):
    """Rows before the first sequence and behind the last one, whose keys are NaN: as if they were not there."""
    case = Case([(200, 200), (5, 60)], dims=dims, index=(4, 64))
    before, behind = 3, 130
    grad = torch.randn(len(case.q), 4, dims[1], device="cuda").bfloat16()

    def run(more):
        def wide(x, value):
            edges = [x.new_full((n, *x.shape[1:]), value) for n in ((before, behind) if more else (0, 0))]
            return torch.cat((edges[0], x.detach(), edges[1]))

        of_keys = [i in (1, 2, 4) for i in range(6)]
        leaves = [wide(x, torch.nan if of_key else 7.0) for x, of_key in zip(case.inputs(), of_keys)]
        leaves = [x.requires_grad_() for x in leaves]
        if dims[0] == 576:
            leaves[2] = leaves[1][..., : dims[1]]
        bounds = [x + before * more for x in case.rest[:2]]
        poison_free_memory(mebibytes=256)
        out, lse, kl = dsa.indexer_warmup_attention(*leaves, *bounds, *case.rest[2:])
        poison_free_memory(mebibytes=256)
        loss = (out * wide(grad, 1.0)).sum() + (kl * wide(case.per_token, 1.0)).sum()
        inputs = [x for x in leaves if x.is_leaf]
        return out, lse.T, kl, *torch.autograd.grad(loss, inputs)

    for i, (x, inner) in enumerate(zip(run(True), run(False))):
        assert relative(x[before:-behind].nan_to_num(posinf=1e3), inner.nan_to_num(posinf=1e3)) < 4e-3
        for edge in (x[:before], x[-behind:]):
            assert edge.eq(torch.inf).all() if i == 1 else not edge.any()


@pytest.mark.parametrize("batch", [1, 5, 1023, 1024, 2500])
def test_bounds_ascend_inside_the_tensors(batch):
    torch.manual_seed(batch)
    tokens = 3 * batch
    right = torch.sort(torch.randint(0, tokens + 1, (2, batch + 1))).values
    hostile = torch.tensor([-1, -(2**31), 2**31 - 1, tokens + 1, 0, tokens])
    wrong = torch.where(torch.rand(2, batch + 1) < 0.3, hostile[torch.randint(0, 6, (2, batch + 1))], right)
    for numbers in (right, wrong, torch.randint(-(2**31), 2**31, (2, batch + 1)), right.flip(1)):
        expected = numbers.masked_fill((numbers < 0) | (numbers > tokens), 0).cummax(1).values
        plan, bounds = _warmup_sum.make_plan((*numbers.int().cuda(), tokens, tokens), tokens, tokens, True)
        assert torch.equal(torch.stack(bounds[:2]).cpu().long(), expected)
        used = plan.q_tiles[plan.q_tiles[:, 1] > 0].cpu()
        first, rows, first_key, keys = used[:, :4].unbind(1)
        assert rows.sum() == expected[0, -1] - expected[0, 0] and (rows <= 128).all()
        assert (first >= 0).all() and (first + rows <= tokens).all()
        assert (first_key >= 0).all() and (first_key + keys <= tokens).all()


def test_repeats_are_the_same_bits():
    case = Case([(700, 700), (33, 900)], heads=16, index=(64, 128))
    assert_runs_have_the_same_bits(case.run, times=3)


def test_nan_stays_in_its_sequence():
    case = Case([(200, 200), (150, 150), (140, 140)])
    clean = case.run()
    case.q_idx[220], case.k_idx[240], case.q[260] = torch.nan, torch.nan, torch.nan
    marked = case.run()
    for x, y in zip(clean[2:], marked[2:]):
        assert torch.equal(x[:200], y[:200]) and torch.equal(x[350:], y[350:])
    assert marked[2][240:350].isnan().all()
    dq, _, dw = marked[3:]
    assert dq[240:350].isnan().all() and dw[240:350].isnan().all()


@pytest.mark.parametrize("index", [(8, 64), (64, 128)])
def test_nan_of_a_key_without_attention(index):
    """The target gives it 0, the indexer NaN: the loss and all gradients of the queries that see it are NaN."""
    case = Case([(200, 200)], index=index)
    case.q.fill_(4.0)
    case.k.zero_()
    case.k[0] = 4.0  # a logit of 181 beside zeros
    case.k_idx[50] = torch.nan
    _, _, kl, dq, dk, dw = case.run()
    assert kl[:50].isfinite().all() and kl[50:].isnan().all()
    assert dq[50:].isnan().all() and dw[50:].isnan().all()
    # The relu has no gradient at the NaN itself, and keys of the last queries may have no active head.
    assert dk[:50].isnan().all() and dk[51:190].isnan().all()


def test_a_graph_takes_new_data():
    def new():
        return Case(LENGTHS)

    def tensors(case):
        return *case.inputs(), case.per_token

    case = new()
    for got in replays(lambda *_: case.run(), tensors(case), lambda: tensors(new())):
        assert_same_bits(got, case.run())


def test_a_sequence_longer_than_said_is_nan():
    """And leaves the others as they are."""
    case = Case([(300, 300), (128, 128)])
    whole, bounds = case.run(), case.rest[:2]
    case.rest = *bounds, 128, 128, *case.rest[4:]
    got = case.run()
    assert got[2][128:300].isnan().all()
    for x, right in zip((got[0], *got[2:]), (whole[0], *whole[2:])):
        assert relative(x[300:], right[300:]) < 4e-3
    q = case.q.requires_grad_()
    out, _, _ = dsa.indexer_warmup_attention(q, *case.inputs()[1:], *case.rest)
    poison_free_memory(mebibytes=64)
    (grad,) = torch.autograd.grad(out.float().sum(), q)
    assert not grad[128:300].any() and not grad[300:].isnan().any()


@pytest.mark.parametrize("dims", [(64, 64), (192, 128), (576, 512)])
@pytest.mark.parametrize("lengths, sequences", [([(5, 7)], 0), ([(5, 0), (3, 0)], 2)])
def test_without_sequences_or_keys_all_is_zero(lengths, sequences, dims):
    case = Case(lengths, dims=dims, index=(4, 64))
    bounds = [x[: sequences + 1] for x in case.rest[:2]]
    leaves = [x.detach().requires_grad_() for x in case.inputs()]
    if dims[0] == 576:
        leaves[2] = leaves[1][..., : dims[1]]
    poison_free_memory(mebibytes=64)
    out, lse, kl = dsa.indexer_warmup_attention(*leaves, *bounds, *case.rest[2:])
    grads = torch.autograd.grad(out.sum() + kl.sum(), [x for x in leaves if x.is_leaf])
    assert lse.eq(torch.inf).all() and not any(x.any() for x in (out, kl, *grads))


def test_without_queries_results_are_empty():
    case = Case([(0, 0)])
    out, lse, kl = dsa.indexer_warmup_attention(*case.inputs(), *case.rest)
    assert out.shape == (0, 4, 128) and lse.shape == (4, 0) and kl.shape == (0,)
