"""The sparse stage's loss and its gradients against the reference in float64, on the GPU."""

import pytest
import torch

import dsa
from dsa.reference.training import sparse_indexer_loss as reference
from dsa.testing import poison_free_memory
from tests.gpu.attention import INF, NAN
from tests.gpu.op_checks import among_nan, assert_runs_have_the_same_bits, assert_same_bits, replays

GRADIENTS = "dq_idx", "dk_idx", "dw_idx"


def inputs(queries, keys, selected, d=576, heads=128, index_heads=64, di=128, w_dtype=torch.float32):
    """As a model has them: logits of a few units, and each query with keys of its own."""

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, device="cuda")).bfloat16()

    q, kv = normal(queries, heads, d), normal(keys, 1, d)
    q_idx, k_idx = normal(queries, index_heads, di, scale=di**-0.25), normal(keys, di, scale=di**-0.25)
    w = (torch.randn(queries, index_heads, device="cuda") * index_heads**-0.5).to(w_dtype)
    order = torch.rand(queries, keys, device="cuda").argsort(1)[:, :selected]
    indices = torch.full((queries, 1, selected), -1, device="cuda", dtype=torch.int32)
    indices[:, 0, : order.shape[1]] = order
    return q, kv, q_idx, k_idx, w, indices, 2 * d**-0.5


def by_reference(tensors, grad, lse=None, dtype=torch.float64):
    """kl and gradients in float64, a few queries at a time."""
    q, kv, q_idx, k_idx, w, indices, scale = tensors
    k, kls, dqs, dws = k_idx.to(dtype).requires_grad_(), [], [], []
    for rows in torch.arange(len(q)).split(16):
        rows = rows.cuda()
        own_q, own_w = (x[rows].to(dtype).requires_grad_() for x in (q_idx, w))
        own_lse = None if lse is None else lse[:, rows].to(dtype)
        kl = reference.sparse_indexer_loss(
            q[rows].to(dtype), kv.to(dtype), own_q, k, own_w, indices[rows], scale, own_lse
        )
        (kl * grad[rows].to(dtype)).sum().backward()
        kls.append(kl.detach())
        dqs.append(own_q.grad)
        dws.append(own_w.grad)
    return torch.cat(kls), torch.cat(dqs), k.grad, torch.cat(dws)


def by_autograd(tensors, grad):
    """Gradients as PyTorch has them in bf16, softmax in fp32 as autocast does."""
    q, kv, q_idx, k_idx, w, indices, scale = tensors
    index = indices[:, 0].long()
    valid = (index >= 0) & (index < len(kv))
    index = index.masked_fill(~valid, 0)
    q_idx, k_idx, w = (x.bfloat16().clone().requires_grad_() for x in (q_idx, k_idx, w))
    with torch.no_grad():
        z = torch.einsum("thd,tjd->thj", q, kv[:, 0][index]).float() * scale
        p = z.masked_fill(~valid[:, None], -1e30).softmax(-1).masked_fill(~valid[:, None], 0).sum(1)
        p = p / p.sum(-1, keepdim=True).clamp(min=1e-30)
    dots = torch.relu(torch.einsum("tid,tjd->tij", q_idx, k_idx[index]))
    scores = torch.einsum("tij,ti->tj", dots, w).float().masked_fill(~valid, -1e30)
    (-(p * scores.log_softmax(-1)).sum(-1) * grad).sum().backward()
    return q_idx.grad, k_idx.grad, w.grad


def run(tensors, grad, lse=None, deterministic=False):
    q, kv, q_idx, k_idx, w, indices, scale = tensors
    q_idx, k_idx, w = (x.detach().requires_grad_() for x in (q_idx, k_idx, w))
    poison_free_memory(mebibytes=64)
    kl = dsa.sparse_indexer_loss(q, kv, q_idx, k_idx, w, indices, scale, lse, deterministic)
    assert kl.dtype == torch.float32 and kl.shape == (len(q),)
    poison_free_memory(mebibytes=64)
    return kl.detach(), *torch.autograd.grad((kl * grad).sum(), (q_idx, k_idx, w))


def distance(got, expected):
    """Relative; to 1e-4 each where all are smaller, as with a single key, whose gradients are 0."""
    least = 1e-4 * expected.numel() ** 0.5
    return ((got.double() - expected).norm() / expected.norm().clamp(min=least)).item()


def check(tensors, lse=None, record_error=None, deterministic=False, limit=0.012):
    grad = torch.rand(len(tensors[0]), device="cuda") + 0.5
    kl, *got = run(tensors, grad, lse, deterministic)
    expected_kl, *expected = by_reference(tensors, grad, lse)
    torch.testing.assert_close(kl.double(), expected_kl, rtol=1e-3, atol=2e-5)
    for name, x, y in zip(GRADIENTS, got, expected):
        assert x.isfinite().all(), name
        error = distance(x, y)
        assert error < limit, f"{name}: relative error {error}"
        if record_error:
            record_error(error)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "d, heads, selected, index_heads, di",
    [
        (576, 128, 2048, 64, 128),
        (512, 64, 512, 64, 128),
        (576, 64, 512, 32, 128),
        (512, 128, 256, 16, 64),
        (576, 16, 130, 8, 64),
        (512, 96, 1, 64, 64),
        (576, 72, 333, 5, 128),
    ],
)
def test_shapes(d, heads, selected, index_heads, di, deterministic, record_error):
    tensors = inputs(140, 3000, selected, d, heads, index_heads, di)
    check(tensors, record_error=record_error, deterministic=deterministic)


@pytest.mark.parametrize("queries", [1, 2, 131, 300])
@pytest.mark.parametrize("selected", [1, 2, 63, 64, 65, 129, 200])
def test_sizes(queries, selected, record_error):
    check(inputs(queries, 77, selected, 512, 16, 8, 64), record_error=record_error)
    check(inputs(queries, 300, selected, 576, 80, 20, 64), record_error=record_error)


@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d, heads, selected", [(576, 128, 1024), (512, 64, 512)])
def test_gradients_are_as_near_as_autograds(d, heads, selected, w_dtype):
    tensors = inputs(64, 2000, selected, d, heads, w_dtype=w_dtype)
    grad = torch.rand(64, device="cuda") + 0.5
    _, *expected = by_reference(tensors, grad)
    own = [distance(x, y) for x, y in zip(run(tensors, grad)[1:], expected)]
    theirs = [distance(x, y) for x, y in zip(by_autograd(tensors, grad), expected)]
    for name, error, other in zip(GRADIENTS, own, theirs):
        assert error < 2 * other, f"{name}: {error}, autograd {other}"


def test_joint_lse(record_error):
    """Heads give the selected keys between all and e^-40 of their attention."""
    tensors = inputs(40, 900, 192, 512, 64)
    own = dsa.flash_mla_sparse_fwd(*tensors[:2], tensors[5], tensors[6])[2].T
    check(tensors, own, record_error)
    check(tensors, own + 40 * torch.rand_like(own), record_error)
    check(tensors, own + 80, record_error)
    assert_same_bits(dsa.sparse_indexer_loss(*tensors, own), dsa.sparse_indexer_loss(*tensors))
    grads = run(tensors, torch.ones(40, device="cuda"), own + INF)
    assert all(not x.any() for x in grads)


def test_indices_that_name_no_key(record_error):
    """They reach nothing, nor does NaN in rows that none names; and keys named twice count twice."""
    tensors = inputs(50, 400, 200, 576, 64, 16, 64)
    indices, kv, k_idx = tensors[5], tensors[1], tensors[3]
    indices[:, 0, ::3] = -1
    indices[0], indices[1, 0, 5:], indices[2, 0, :-1] = -1, -(2**31), 400
    indices[3, 0, 100:] = 2**31 - 1
    indices[4, 0, 150:] = indices[4, 0, 1]
    indices[5] = 7
    check(tensors, record_error=record_error)
    named = indices[(indices >= 0) & (indices < 400)].long().unique()
    unnamed = torch.ones(400, device="cuda", dtype=torch.bool).index_fill_(0, named, False)
    unnamed[11] = True
    indices[indices == 11] = -1
    expected = run(tensors, torch.ones(50, device="cuda"), deterministic=True)
    kv[unnamed], k_idx[unnamed] = NAN, INF
    got = run(tensors, torch.ones(50, device="cuda"), deterministic=True)
    assert_same_bits(got, expected)
    assert got[0][0] == 0 and not got[2][unnamed].any() and not got[1][0].any() and not got[3][0].any()


def test_weights_of_zero_and_relu_at_zero():
    tensors = inputs(20, 300, 100, 512, 16, 16, 64)
    tensors[4][::2] = 0
    tensors[3][::5] = 0
    check(tensors)
    tensors[4].zero_()
    _, dq, dk, dw = run(tensors, torch.ones(20, device="cuda"))
    assert not dq.any() and not dk.any() and dw.any()


def test_all_mass_on_one_key():
    q, *rest, scale = inputs(30, 500, 150, 576, 32, 16, 64)
    check((q, *rest, 300 * scale), limit=0.02)
    rest[2] = 30 * rest[2]
    check((q, *rest, 300 * scale), limit=0.02)


def test_nan_reaches_its_query_only():
    tensors = inputs(12, 200, 64, 512, 16, 16, 64)
    tensors[0][3, 2, 5] = NAN
    # Nothing but d_scores has it here, and sums of integers cannot; k_idx's gradient is that of all queries.
    assert run(tensors, torch.ones(12, device="cuda"), deterministic=True)[2].isnan().all()
    tensors[2][7, 1, 9] = NAN
    kl, dq, _, dw = run(tensors, torch.ones(12, device="cuda"))
    for x in (kl, dq.flatten(1).sum(1), dw.sum(1)):
        assert x.isnan().nonzero().flatten().tolist() == [3, 7]


def test_strides_change_no_bit():
    *tensors, scale = inputs(30, 200, 128, 576, 64, 16, 64)
    expected = run((*tensors, scale), torch.ones(30, device="cuda"), deterministic=True)
    wide = [among_nan(x) for x in tensors[:5]]
    wide[2] = among_nan(tensors[2].transpose(0, 1)).transpose(0, 1)
    indices = torch.nn.functional.pad(tensors[5], (8, 24))[..., 8:-24]
    got = run((*wide, indices, scale), torch.ones(1, device="cuda").expand(30), deterministic=True)
    assert_same_bits(got, expected)
    odd = among_nan(tensors[0], 0, 1)  # rows at no multiple of 16 bytes
    assert_same_bits(dsa.sparse_indexer_loss(odd, *tensors[1:], scale), expected[0])


def test_deterministic_runs_are_identical():
    tensors = inputs(400, 600, 512, 512, 64)
    grad = torch.rand(400, device="cuda")
    assert_runs_have_the_same_bits(run, tensors, grad, deterministic=True, times=10)
    kl, dq, dk, dw = run(tensors, grad, deterministic=True)
    plain = run(tensors, grad)
    assert_same_bits((plain[0], plain[1], plain[3]), (kl, dq, dw))
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(run(tensors, grad, deterministic=None)[2], dk)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_deterministic_sums_of_every_size(size):
    tensors = inputs(40, 100, 64, 512, 16, 16, 64)
    grad = torch.rand(40, device="cuda")
    expected, got = run(tensors, grad), run(tensors, grad * size, deterministic=True)
    assert distance(got[2].double() / size, expected[2].double()) < 0.01
    assert run(tensors, grad * INF, deterministic=True)[2].isnan().all()


def test_a_graph_takes_new_data():
    def new():
        return inputs(100, 500, 192, 576, 64, 16, 64)[:6]

    *given, scale = inputs(100, 500, 192, 576, 64, 16, 64)
    grad = torch.rand(100, device="cuda")

    def call(*tensors):
        return run((*tensors, scale), grad, deterministic=True)

    for got in replays(call, given, new):
        assert_same_bits(got, call(*given))


def test_offsets_beyond_32_bits():
    """kv of 2.3e9 numbers, and indices at its end."""
    q, kv, q_idx, k_idx, w, indices, scale = inputs(20, 300, 128, 576, 16, 8, 64)
    first = 4_000_000 - 300
    large = torch.empty(4_000_000, 1, 576, device="cuda", dtype=torch.bfloat16)
    large_idx = torch.empty(4_000_000, 64, device="cuda", dtype=torch.bfloat16)
    large[first:], large_idx[first:] = kv, k_idx
    grad = torch.ones(20, device="cuda")
    expected = run((q, kv, q_idx, k_idx, w, indices, scale), grad, deterministic=True)
    kl, dq, dk, dw = run((q, large, q_idx, large_idx, w, indices + first, scale), grad, deterministic=True)
    assert_same_bits((kl, dq, dk[first:], dw), expected)
