"""Gradients of sparse MLA attention on the GPU against float64, beside what 16-bit autograd of the reference gives."""

import math

import pytest
import torch

import dsa
from dsa.ops.training import sparse_mla_attention as op
from dsa.reference.training import masked_softmax as shared
from dsa.reference.training import sparse_mla_attention as reference
from dsa.testing import poison_free_memory
from tests.gpu.attention import BF16, D_V, INF, KINDS, NAN, spoiled
from tests.gpu.op_checks import assert_runs_have_the_same_bits, assert_same_bits, replays


def selected(tokens, keys, k, share=0.1):
    """Random keys, any of them several times, and a share of indices that are none."""
    indices = torch.randint(0, max(keys, 1), (tokens, 1, k), dtype=torch.int32, device="cuda")
    return spoiled(indices, keys, share if keys else 1)


def inputs(tokens=5, heads=64, keys=300, k=100, d=576, dtype=BF16, sink=False, share=0.1):
    """q, kv, indices, sink"""
    q, kv = torch.randn(tokens, heads, d, device="cuda") / 3, torch.randn(keys, 1, d, device="cuda") / 3
    # A sink that is about as heavy as the keys.
    own = torch.randn(heads, device="cuda") + math.log(max(k, 1)) if sink else None
    return q.to(dtype), kv.to(dtype), selected(tokens, keys, k, share), own


def gradients(op, q, kv, indices, sink, dout, dlse, **options):
    """out, lse and the gradients of q, kv and the sink if there is one."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, kv, *(() if sink is None else (sink,)))]
    out, lse = op(leaves[0], leaves[1], indices, q.shape[2] ** -0.5, D_V, *leaves[2:], **options)
    results = [(x, dx.to(x.dtype)) for x, dx in ((out, dout), (lse, dlse)) if dx is not None]
    found = torch.autograd.grad([x for x, _ in results], leaves, [dx for _, dx in results], allow_unused=True)
    return out, lse, *(torch.zeros_like(x) if dx is None else dx for x, dx in zip(leaves, found))


def distance(x, y):
    """Of x from y, relative to y's norm."""
    norm = y.double().norm().item()
    return (x.double() - y.double()).norm().item() / norm if norm else x.double().norm().item()


def rounded_reference(q, kv, indices, scale, d_v, sink=None):
    """The reference with the weights rounded to q's dtype before they are multiplied, as every 16-bit attention."""
    index, valid = shared.selected(indices, len(kv))
    rows = shared.rows_of(kv[:, 0], index)
    logits = scale * torch.einsum("thd,tjd->htj", q.float(), rows.float())
    weights, lse = shared.masked_softmax(logits, valid)
    if sink is not None:
        share = torch.sigmoid(lse.T - sink.float())
        weights = weights * share.masked_fill(lse.T == torch.inf, 0.0).T[..., None]
    return torch.einsum("htj,tjd->thd", weights.to(q.dtype), rows[..., :d_v]), lse


def rounding_of_delta(out, q, dout):
    """Absolute tolerances of dq, dkv and dsink: delta = out . dout uses the rounded out.

    This error remains where a gradient cancels, as with all weight on one key. The tolerances are a few times what
    random errors of half an ulp give.
    """
    if dout is None:
        return {}
    out, dout, q = (x.double().norm(dim=-1) for x in (out, dout, q))
    each, scale = out * dout * 2**-9 / 10, 512**-0.5
    found = {"dq": (each * out * scale).norm(), "dkv": (each * q * scale).norm(), "dsink": each.norm()}
    return {name: noise.item() for name, noise in found.items()}


def check(q, kv, indices, sink, record_error=None, of=("out",), **options):
    """The gradient of a random combination of out, lse or both."""
    shape = q.shape[0], q.shape[1], D_V
    dout = torch.randn(shape, device="cuda").to(q.dtype) if "out" in of else None
    dlse = torch.randn(q.shape[1], q.shape[0], device="cuda") if "lse" in of else None
    poison_free_memory(mebibytes=64)
    got = gradients(dsa.sparse_mla_attention, q, kv, indices, sink, dout, dlse, **options)
    wide = [None if x is None else x.double() for x in (q, kv, sink)]
    expected = gradients(reference.sparse_mla_attention, *wide[:2], indices, wide[2], dout, dlse)
    beside = gradients(rounded_reference, q, kv, indices, sink, dout, dlse)
    noises = rounding_of_delta(got[0], q, dout)
    for name, x, true, other in zip(("out", "lse", "dq", "dkv", "dsink"), got, expected, beside):
        if name == "lse":
            torch.testing.assert_close(x.double(), true, atol=1e-5, rtol=8.01 / 65536)
            continue
        assert x.isfinite().all(), name
        allowed = min(2 * distance(other, true), 1e-2) if name != "dsink" else 1e-2
        error, norm = (x.double() - true.double()).norm().item(), true.double().norm().item()
        most = allowed * norm + noises.get(name, 0.0) + 1e-6
        assert error <= most, f"{name}: {error:.2e} of at most {most:.2e}, norm {norm:.2e}"
        # Of a gradient that cancels, an error relative to it says nothing.
        if record_error and norm > 100 * noises.get(name, 0.0) + 1e-3:
            record_error(error / norm)
    return got


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("heads", [1, 8, 16, 48, 64, 80, 128])
def test_heads(heads, d, dtype, record_error):
    check(*inputs(13, heads, 400, 200, d, dtype, sink=True), record_error, of=("out", "lse"))


@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("k", [1, 2, 63, 64, 65, 127, 129, 500])
def test_selected_keys(k, d, record_error):
    check(*inputs(9, 64, 700, k, d), record_error)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("keys", [1, 63, 3000])
@pytest.mark.parametrize("tokens", [1, 3, 257])
def test_lengths(tokens, keys, heads, record_error):
    check(*inputs(tokens, heads, keys, 130), record_error)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [576, 512])
def test_many_queries(d, deterministic, record_error):
    """Several units a CTA, an odd number of tiles, and all of V3.2's heads."""
    check(*inputs(300, 128, 2000, 300, d, sink=True), record_error, of=("out", "lse"), deterministic=deterministic)


@pytest.mark.parametrize("of", [("out",), ("lse",), ("out", "lse")], ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_what_the_gradient_is_of(sink, of, record_error):
    check(*inputs(20, 64, 300, 100, sink=sink), record_error, of=of)


@pytest.mark.parametrize("deterministic", [False, True])
def test_queries_without_keys(deterministic):
    """Zeros of their own whatever reaches their lse, and nothing for others; whole tiles without keys, too."""
    q, kv, indices, sink = inputs(40, 64, 300, 200, sink=True)
    indices[3:9] = -1
    indices[20:, :, 64:128] = 300
    dout, dlse = torch.randn(40, 64, D_V, device="cuda").bfloat16(), torch.randn(64, 40, device="cuda")
    dlse[:, 3:6], dlse[:, 6:9] = NAN, INF
    got = gradients(dsa.sparse_mla_attention, q, kv, indices, sink, dout, dlse, deterministic=deterministic)
    assert got[2][3:9].eq(0).all()
    some = [*range(3), *range(9, 40)]
    rest = gradients(
        dsa.sparse_mla_attention, q[some], kv, indices[some], sink, dout[some], dlse[:, some], deterministic=True
    )
    assert torch.equal(got[2][some], rest[2])
    assert distance(got[3], rest[3]) < 1e-3 and distance(got[4], rest[4]) < 1e-4


def test_nan_in_keys_that_nobody_selects():
    q, kv, indices, _ = inputs(20, 64, 300, 100, share=0)
    indices %= 200
    expected = check(q, kv, indices, None)
    kv[200:] = NAN
    got = gradients(dsa.sparse_mla_attention, q, kv, indices, None, torch.ones_like(expected[0]), None)
    assert all(x.isfinite().all() for x in got[2:]) and got[3][200:].eq(0).all()


def test_all_weight_on_one_key(record_error):
    q, kv, indices, _ = inputs(10, 64, 100, 70, share=0)
    kv[indices[:, 0, 5].long()] *= 20
    check(q * 3, kv, indices, None, record_error)


def test_a_key_named_many_times(record_error):
    q, kv, indices, _ = inputs(10, 64, 100, 130, share=0)
    indices[:] = 7
    check(q, kv, indices, None, record_error)


@pytest.mark.parametrize("value", [-INF, -100.0, 100.0, INF])
def test_extreme_sinks(value):
    q, kv, indices, _ = inputs(10, 64, 200, 100, share=0)
    sink = torch.full((64,), value, device="cuda")
    dout, dlse = torch.randn(10, 64, D_V, device="cuda").bfloat16(), torch.randn(64, 10, device="cuda")
    got = gradients(dsa.sparse_mla_attention, q, kv, indices, sink, dout, dlse)
    wide = (q.double(), kv.double(), indices, sink.double().clamp(-1000, 1000), dout, dlse)
    expected = gradients(reference.sparse_mla_attention, *wide)
    for x, true in zip(got[2:4], expected[2:4]):
        assert distance(x, true) < 1e-2


@pytest.mark.parametrize("d", [576, 512])
def test_strides(d):
    """Queries, keys, indices and what comes from behind need not be contiguous."""
    q, kv, indices, sink = inputs(30, 64, 200, 100, d, sink=True)
    dout, dlse = torch.randn(30, 64, D_V, device="cuda").bfloat16(), torch.randn(64, 30, device="cuda")
    expected = gradients(dsa.sparse_mla_attention, q, kv, indices, sink, dout, dlse, deterministic=True)
    leaves = [
        torch.empty(64, 30, d + 8, device="cuda", dtype=q.dtype).transpose(0, 1)[..., :d].copy_(q),
        torch.empty(200, 1, d + 64, device="cuda", dtype=q.dtype)[..., :d].copy_(kv),
        torch.empty(64, 3, device="cuda")[:, 1].copy_(sink),
    ]
    leaves = [x.detach().requires_grad_() for x in leaves]
    spread = torch.empty(30, 1, 200, device="cuda", dtype=torch.int32)[..., ::2].copy_(indices)
    out, lse = dsa.sparse_mla_attention(*leaves[:2], spread, d**-0.5, D_V, leaves[2], True)
    behind = torch.empty(30, D_V, 64, device="cuda", dtype=q.dtype).transpose(1, 2).copy_(dout), dlse.T.contiguous().T
    got = torch.autograd.grad([out, lse], leaves, behind)
    assert_same_bits((out, lse, *got), expected)


def test_deterministic_repeats():
    q, kv, indices, sink = inputs(150, 128, 500, 300, sink=True)
    dout, dlse = torch.randn(150, 128, D_V, device="cuda").bfloat16(), torch.randn(128, 150, device="cuda")
    arguments = (dsa.sparse_mla_attention, q, kv, indices, sink, dout, dlse)
    assert_runs_have_the_same_bits(gradients, *arguments, deterministic=True, times=3)
    first, free = gradients(*arguments, deterministic=True), gradients(*arguments)
    # Only dkv's order is free.
    assert_same_bits((free[2], free[4]), (first[2], first[4]))
    assert distance(free[3], first[3]) < 1e-3
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(gradients(*arguments), first)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("share", [4, 1 / 20])
@pytest.mark.parametrize("deterministic", [False, True])
def test_more_and_fewer_ctas_than_multiprocessors(monkeypatch, share, deterministic):
    """Many queries a CTA, and CTAs that begin when there are none left to draw; dq is the same whoever computes it."""
    q, kv, indices, sink = inputs(700, 80, 400, 200, sink=True)
    out, lse = dsa.sparse_mla_attention(q, kv, indices, 0.1, D_V, sink)
    arguments = (q, kv, indices, 0.1, sink, out, lse.T, torch.randn_like(out), None, deterministic)
    dq, dkv, dsink = op.gradients(*arguments)
    count = int(share * torch.cuda.get_device_properties(0).multi_processor_count)
    monkeypatch.setattr(op.backends, "num_sms", lambda _: count)
    again = op.gradients(*arguments)
    assert torch.equal(dq, again[0]) and torch.equal(dsink, again[2])
    assert distance(again[1], dkv) < 1e-3


def test_deterministic_parts_of_more_than_2_31_numbers():
    """Lists so long that the rows of as many queries as are worked on at a time need offsets of 64 bits."""
    tokens = torch.cuda.get_device_properties(0).multi_processor_count
    q, kv, indices, _ = inputs(tokens, 16, 300, 2**31 // 576 // tokens + 64)
    dout = torch.randn(tokens, 16, D_V, device="cuda").bfloat16()
    first = gradients(dsa.sparse_mla_attention, q, kv, indices, None, dout, None, deterministic=True)
    free = gradients(dsa.sparse_mla_attention, q, kv, indices, None, dout, None)
    assert torch.equal(first[2], free[2]) and distance(first[3], free[3]) < 1e-3


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_graph_takes_new_data(deterministic):
    def call(*given):
        return gradients(dsa.sparse_mla_attention, *given, None, deterministic=deterministic)

    def new():
        return *inputs(40, 64, 300, 130, sink=True), torch.randn(40, 64, D_V, device="cuda").bfloat16()

    given = new()
    for out, lse, dq, dkv, dsink in replays(call, given, new):
        expected = call(*given)
        assert_same_bits((out, lse, dq, dsink), (*expected[:3], expected[4]))
        assert torch.equal(dkv, expected[3]) if deterministic else distance(dkv, expected[3]) < 1e-3


def test_frozen_inputs():
    """Gradients that nobody asks for do not stop those that somebody does."""
    q, kv, indices, sink = inputs(10, 64, 100, 64, sink=True)
    ones = torch.ones(10, 64, D_V, device="cuda")
    expected = gradients(dsa.sparse_mla_attention, q, kv, indices, sink, ones, None)[3]
    out, _ = dsa.sparse_mla_attention(q, kv.requires_grad_(), indices, 576**-0.5, D_V, sink)
    out.float().sum().backward()
    assert q.grad is None and distance(kv.grad, expected) < 1e-3
