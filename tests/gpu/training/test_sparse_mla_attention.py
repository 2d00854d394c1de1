"""Sparse MLA attention and its gradients on the GPU against float64: as near as 16-bit rounding allows."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.training import check_attention, distance
from dsa.ops.training import sparse_mla_attention as op
from dsa.testing import poison_free_memory
from tests.gpu.attention import D_V, INF, KINDS, NAN
from tests.gpu.op_checks import assert_same_bits

(DETERMINISTIC,) = cases_of("sparse_mla_attention")
# The grids' tolerance, which is that of 16-bit rounding alone.
CASE = replace(DETERMINISTIC, check=partial(check_attention, most=INF))


def arguments(tokens=5, **sizes):
    return CASE.arguments("cuda", tokens=tokens, **sizes)


def verify(record_error, of=(0, 1), tokens=5, **sizes):
    poison_free_memory(mebibytes=64)
    case = replace(CASE, of=of, check=partial(check_attention, of=of, most=INF), sizes={})
    record_error(case.verify("cuda", tokens=tokens, **sizes))


def check(given, record_error=None):
    error = CASE.check(given, CASE.results(given))
    if record_error:
        record_error(error)


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("heads", [1, 8, 16, 48, 64, 80, 128])
def test_heads(heads, d, dtype, record_error):
    verify(record_error, tokens=13, heads=heads, keys=400, k=200, d=d, dtype=dtype)


@pytest.mark.parametrize("d", [576, 512])
@pytest.mark.parametrize("k", [1, 2, 63, 64, 65, 127, 129, 500])
def test_selected_keys(k, d, record_error):
    verify(record_error, of=(0,), tokens=9, keys=700, k=k, d=d, sink=False)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("keys", [1, 63, 3000])
@pytest.mark.parametrize("tokens", [1, 3, 257])
def test_lengths(tokens, keys, heads, record_error):
    verify(record_error, of=(0,), tokens=tokens, heads=heads, keys=keys, k=130, sink=False)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [576, 512])
def test_many_queries(d, deterministic, record_error):
    """Several units a CTA, an odd number of tiles, and all of V3.2's heads."""
    sizes = {"tokens": 300, "heads": 128, "keys": 2000, "k": 300}
    verify(record_error, **sizes, d=d, deterministic=deterministic)


@pytest.mark.parametrize("of", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_gradients_of_out_and_of_lse(sink, of, record_error):
    leaves = ("q", "kv") if of == (1,) else ("q", "kv", "attn_sink")  # lse is without the sink
    verify(record_error, of=of, tokens=20, sink=sink, leaves=leaves)


@pytest.mark.parametrize("deterministic", [False, True])
def test_queries_without_keys_change_no_other_query(deterministic):
    """Whatever reaches their lse; whole tiles without keys, too."""
    given = arguments(tokens=40, k=200, deterministic=deterministic)
    given["indices"][3:9] = -1
    given["indices"][20:, :, 64:128] = 300
    dout, dlse = torch.randn(40, 64, D_V, device="cuda").bfloat16(), torch.randn(64, 40, device="cuda")
    dlse[:, 3:6], dlse[:, 6:9] = NAN, INF
    some = [t for t in range(40) if not 3 <= t < 9]
    rest = given | {"q": given["q"].detach()[some].requires_grad_(), "indices": given["indices"][some]}
    got, expected = (
        torch.autograd.grad(dsa.sparse_mla_attention(**x), [x[name] for name in ("q", "kv", "attn_sink")], upstream)
        for x, upstream in ((given, (dout, dlse)), (rest, (dout[some], dlse[:, some])))
    )
    assert got[0][3:9].eq(0).all() and torch.equal(got[0][some], expected[0])
    assert distance(got[1], expected[1]) < 1e-3 and distance(got[2], expected[2]) < 1e-4


def test_nan_in_an_unselected_key_reaches_nothing():
    given = arguments(tokens=20, sink=False, invalid=0.0)
    given["indices"] %= 200
    with torch.no_grad():
        given["kv"][200:] = NAN
    out, lse, dq, dkv = CASE.results(given)
    assert all(x.isfinite().all() for x in (out, lse, dq, dkv)) and dkv[200:].eq(0).all()


def test_all_weight_on_one_key(record_error):
    given = arguments(tokens=10, keys=100, k=70, sink=False, invalid=0.0)
    with torch.no_grad():
        given["kv"][given["indices"][:, 0, 5].long()] *= 20
        given["q"] *= 3
    check(given, record_error)


def test_a_key_named_many_times(record_error):
    given = arguments(tokens=10, keys=100, k=130, sink=False)
    check(given | {"indices": torch.full_like(given["indices"], 7)}, record_error)


@pytest.mark.parametrize("value", [-INF, -100.0, 100.0, INF])
def test_extreme_sinks(value):
    given = arguments(tokens=10, keys=200, invalid=0.0, leaves=("q", "kv"))
    given["attn_sink"].fill_(value)
    _, _, *got = CASE.results(given)
    with dsa.use_backend("reference"):
        _, _, *expected = CASE.results(given)
    for x, right in zip(got, expected, strict=True):
        assert distance(x, right) < 1e-2


@pytest.mark.parametrize("d", [576, 512])
def test_strides_change_no_bit(d):
    """Queries, keys, indices, sinks and upstream gradients need not be contiguous."""
    given = arguments(tokens=30, keys=200, d=d, deterministic=True)
    spread = given | {
        "q": torch.empty(64, 30, d + 8, device="cuda", dtype=torch.bfloat16).transpose(0, 1)[..., :d],
        "kv": torch.empty(200, 1, d + 64, device="cuda", dtype=torch.bfloat16)[..., :d],
        "attn_sink": torch.empty(64, 3, device="cuda")[:, 1],
        "indices": torch.empty(30, 1, 200, device="cuda", dtype=torch.int32)[..., ::2],
    }
    for name in ("q", "kv", "attn_sink", "indices"):
        spread[name].copy_(given[name].detach()).requires_grad_(given[name].requires_grad)
    assert_same_bits(CASE.results(spread), CASE.results(given))
    dout, dlse = torch.randn(30, 64, D_V, device="cuda").bfloat16(), torch.randn(64, 30, device="cuda")
    upstream = [(dout, dlse), (dout.mT.contiguous().mT, dlse.T.contiguous().T)]
    leaves, results = [given[name] for name in ("q", "kv", "attn_sink")], dsa.sparse_mla_attention(**given)
    assert_same_bits(*(torch.autograd.grad(results, leaves, x, retain_graph=True) for x in upstream))


def test_only_the_order_of_kvs_gradient_is_free():
    given = arguments(tokens=150, heads=128, keys=500, k=300, deterministic=True)
    fixed, free = CASE.results(given), CASE.results(given | {"deterministic": False})
    assert_same_bits((*free[:3], free[4]), (*fixed[:3], fixed[4]))
    assert distance(free[3], fixed[3]) < 1e-3
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(CASE.results(given | {"deterministic": None}), fixed)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("share", [4, 1 / 20])
@pytest.mark.parametrize("deterministic", [False, True])
def test_more_and_fewer_ctas_than_multiprocessors(monkeypatch, share, deterministic):
    """Many queries per CTA, and CTAs that start when no query is left. dq does not depend on the CTA."""
    given = arguments(tokens=700, heads=80, keys=400, k=200, deterministic=deterministic)
    leaves, (out, _) = [given[name] for name in ("q", "kv", "attn_sink")], dsa.sparse_mla_attention(**given)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    count = int(share * torch.cuda.get_device_properties(0).multi_processor_count)
    monkeypatch.setattr(op.backends, "num_sms", lambda _: count)
    again = torch.autograd.grad(out, leaves, dout)
    assert torch.equal(first[0], again[0]) and torch.equal(first[2], again[2])
    assert distance(again[1], first[1]) < 1e-3


def test_deterministic_parts_of_more_than_2_31_numbers():
    """Lists so long that the partial sums of one launch need 64-bit offsets."""
    tokens = torch.cuda.get_device_properties(0).multi_processor_count
    given = arguments(tokens=tokens, heads=16, k=2**31 // 576 // tokens + 64, sink=False, deterministic=True)
    fixed, free = CASE.results(given), CASE.results(given | {"deterministic": False})
    assert torch.equal(fixed[2], free[2]) and distance(fixed[3], free[3]) < 1e-3


def test_a_frozen_q_does_not_stop_kvs_gradient():
    given = arguments(tokens=10, keys=100, k=64)
    _, _, _, expected, _ = CASE.results(given)
    frozen = {name: given[name].detach() for name in ("q", "attn_sink")}
    _, _, alone = CASE.results(given | frozen)
    assert distance(alone, expected) < 1e-3
