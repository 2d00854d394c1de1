"""sparse_mla_attention (the sparse stage of training) and its gradients on the GPU, compared with float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.training import check_attention, distance
from dsa.ops.training import sparse_mla_attention as op
from tests.gpu.attention import D_V, INF, KINDS, NAN
from tests.gpu.case_checks import by_sizes, check_layouts, grid, verify
from tests.gpu.op_checks import assert_same_bits

(DETERMINISTIC,) = cases_of("sparse_mla_attention")
# most=INF: `check_attention` then only requires at most twice the relative error of the formula in 16 bits, and at most
# 1e-2.
CASE = replace(DETERMINISTIC, check=partial(check_attention, most=INF), sizes={"tokens": 5})
LEAVES = ("q", "kv", "attn_sink")
BOTH, OUT, LSE = ((0, 1),), ((0,),), ((1,),)  # indices of the results (out, lse) through which gradients flow


def arguments(**sizes):
    return CASE.arguments("cuda", **CASE.sizes | sizes)


def leaves_of(given):
    return [given[name] for name in LEAVES]


@by_sizes(
    *(
        grid(of=BOTH, tokens=[13], heads=(1, 8, 16, 48, 64, 80, 128), keys=[400], k=[200], d=[d], dtype=[dtype])
        for d, dtype in KINDS
    ),
    grid(of=OUT, tokens=[9], keys=[700], k=(1, 2, 63, 64, 65, 127, 129, 500), d=(576, 512), sink=[False]),
    grid(of=OUT, tokens=(1, 3, 257), heads=(16, 128), keys=(1, 63, 3000), k=[130], sink=[False]),
    # Several work tiles per CTA, an odd number of key tiles per list, and V3.2's 128 heads.
    grid(of=BOTH, tokens=[300], heads=[128], keys=[2000], k=[300], d=(576, 512), deterministic=(False, True)),
    grid(of=(*OUT, *BOTH), tokens=[20], sink=(False, True)),
    grid(of=LSE, tokens=[20], sink=(False, True), leaves=[LEAVES[:2]]),  # lse excludes the sink
)
def test_every_size_is_right(sizes, record_error):
    of, own = sizes["of"], {name: x for name, x in sizes.items() if name != "of"}
    verify(replace(CASE, of=of, check=partial(check_attention, of=of, most=INF)), own, record_error)


def test_gradients_of_the_lse_of_queries_without_keys_reach_nothing():
    """Queries 3 to 8 have no keys. For queries from 20 on, one key tile of the list has no valid key."""
    given = arguments(tokens=40, k=200, deterministic=True)
    given["indices"][3:9], given["indices"][20:, :, 64:128] = -1, 300
    results, dlse = dsa.sparse_mla_attention(**given), torch.randn(64, 40, device="cuda")
    wrong, dout = dlse.clone(), torch.randn_like(results[0])
    wrong[:, 3:6], wrong[:, 6:9] = NAN, INF
    got, expected = (
        torch.autograd.grad(results, leaves_of(given), (dout, x), retain_graph=True) for x in (wrong, dlse)
    )
    assert_same_bits(got, expected)
    assert not got[0][3:9].any()


def test_nan_in_an_unselected_key_does_not_reach_a_result():
    given = arguments(tokens=20, sink=False, invalid=0.0)
    given["indices"] %= 200
    with torch.no_grad():
        given["kv"][200:] = NAN
    out, lse, dq, dkv = CASE.results(given)
    assert all(x.isfinite().all() for x in (out, lse, dq, dkv)) and dkv[200:].eq(0).all()


def test_all_weight_on_one_key_is_right(record_error):
    given = arguments(tokens=10, keys=100, k=70, sink=False, invalid=0.0)
    with torch.no_grad():
        given["kv"][given["indices"][:, 0, 5].long()] *= 20
        given["q"] *= 3
    record_error(CASE.check_call(given))


def test_a_key_named_many_times_is_right(record_error):
    given = arguments(tokens=10, keys=100, k=130, sink=False)
    record_error(CASE.check_call(given | {"indices": torch.full_like(given["indices"], 7)}))


@pytest.mark.parametrize("value", [-INF, -100.0, 100.0, INF])
def test_gradients_with_an_extreme_sink_are_those_of_the_reference(value):
    given = arguments(tokens=10, keys=200, invalid=0.0, leaves=("q", "kv"))
    given["attn_sink"].fill_(value)
    _, _, *got = CASE.results(given)
    with dsa.use_backend("reference"):
        _, _, *expected = CASE.results(given)
    assert all(distance(x, right) < 1e-2 for x, right in zip(got, expected, strict=True))


@pytest.mark.parametrize("d", [576, 512])
def test_layouts_change_no_bit(d):
    sizes = {"tokens": 30, "keys": 200, "d": d, "deterministic": True}
    check_layouts(CASE, (*LEAVES, "indices"), **sizes)
    given = arguments(**sizes)
    dout, dlse = torch.randn(30, 64, D_V, device="cuda").bfloat16(), torch.randn(64, 30, device="cuda")
    upstream = [(dout, dlse), (dout.mT.contiguous().mT, dlse.T.contiguous().T)]
    results = dsa.sparse_mla_attention(**given)
    assert_same_bits(*(torch.autograd.grad(results, leaves_of(given), x, retain_graph=True) for x in upstream))


def test_only_the_order_of_kvs_gradient_is_free(monkeypatch):
    given = arguments(tokens=150, heads=128, keys=500, k=300, deterministic=True)
    fixed, free = CASE.results(given), CASE.results(given | {"deterministic": False})
    assert_same_bits((*free[:3], free[4]), (*fixed[:3], fixed[4]))
    assert distance(free[3], fixed[3]) < 1e-3
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert_same_bits(CASE.results(given | {"deterministic": None}), fixed)


@pytest.mark.parametrize("share", [4, 1 / 20])
@pytest.mark.parametrize("deterministic", [False, True])
def test_queries_gradients_do_not_depend_on_the_number_of_ctas(monkeypatch, share, deterministic):
    """With a share of 1/20 each CTA has many queries. With 4 some CTAs start when no query is left."""
    given = arguments(tokens=700, heads=80, keys=400, k=200, deterministic=deterministic)
    out, _ = dsa.sparse_mla_attention(**given)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves_of(given), dout, retain_graph=True)
    count = int(share * torch.cuda.get_device_properties(0).multi_processor_count)
    monkeypatch.setattr(op.backends, "num_sms", lambda _: count)
    again = torch.autograd.grad(out, leaves_of(given), dout)
    assert torch.equal(first[0], again[0]) and torch.equal(first[2], again[2])
    assert distance(again[1], first[1]) < 1e-3


def test_deterministic_parts_of_more_than_2_31_numbers():
    tokens = torch.cuda.get_device_properties(0).multi_processor_count
    given = arguments(tokens=tokens, heads=16, k=2**31 // 576 // tokens + 64, sink=False, deterministic=True)
    fixed, free = CASE.results(given), CASE.results(given | {"deterministic": False})
    assert torch.equal(fixed[2], free[2]) and distance(fixed[3], free[3]) < 1e-3


def test_a_frozen_q_does_not_stop_kvs_gradient():
    given = arguments(tokens=10, keys=100, k=64)
    _, _, _, expected, _ = CASE.results(given)
    _, _, alone = CASE.results(given | {name: given[name].detach() for name in ("q", "attn_sink")})
    assert distance(alone, expected) < 1e-3
