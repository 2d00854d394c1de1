"""sparse_indexer_loss (the sparse stage of training) and its gradients on the GPU, compared with float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.training import INDEXER, check_loss, distance, gradients_of, sparse_kl, with_leaves
from tests.gpu.attention import INF, NAN
from tests.gpu.case_checks import by_sizes, check_layouts, grid, verify
from tests.gpu.op_checks import assert_runs_have_the_same_bits, assert_same_bits

CASE = replace(*cases_of("sparse_indexer_loss"), sizes={})
SMALL = {"d": 512, "heads": 16, "index_heads": 16, "di": 64}
JOINT = {"tokens": 40, "keys": 900, "k": 192, "d": 512, "heads": 64}
NAMES = ("d", "heads", "k", "index_heads", "di")
MODELS = [
    dict(zip(NAMES, model, strict=True))
    for model in (
        *((576, 128, 2048, 64, 128), (512, 64, 512, 64, 128), (576, 64, 512, 32, 128), (512, 128, 256, 16, 64)),
        *((576, 16, 130, 8, 64), (512, 96, 1, 64, 64), (576, 72, 333, 5, 128)),
    )
]
COUNTS = {"tokens": (1, 2, 131, 300), "k": (1, 2, 63, 64, 65, 129, 200), "di": [64]}


def arguments(tokens, keys, k, **sizes):
    return CASE.arguments("cuda", tokens=tokens, keys=keys, k=k, **sizes)


def small(tokens, keys, k, **sizes):
    return arguments(tokens, keys, k, **SMALL | sizes)


@by_sizes(
    grid(**COUNTS, keys=[77], d=[512], heads=[16], index_heads=[8]),
    grid(**COUNTS, keys=[300], d=[576], heads=[80], index_heads=[20]),
    [JOINT | {"joint": joint} for joint in (0.0, 40.0)],
    [{"tokens": 140, "keys": 3000, "deterministic": x, **sizes} for sizes in MODELS for x in (False, True)],
)
def test_every_size_is_right(sizes, record_error):
    """joint: the given `lse` exceeds the LSE of the selected keys by up to this number, as with a window and a sink."""
    verify(CASE, sizes, record_error)


@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d, heads, k", [(576, 128, 1024), (512, 64, 512)])
def test_gradients_are_as_near_as_autograds_in_bf16(d, heads, k, w_dtype):
    given = arguments(64, 2000, k, d=d, heads=heads, w_dtype=w_dtype)
    exact, rough = with_leaves(given, torch.float64), with_leaves(given, torch.bfloat16)
    expected, theirs = (gradients_of([sparse_kl(x)], x) for x in (exact, rough))
    for name, x, other, right in zip(INDEXER, CASE.results(given)[1:], theirs, expected, strict=True):
        error, most = distance(x, right), 2 * distance(other, right)
        assert error < most, f"{name}: {error}, autograd in bf16 {most / 2}"


def test_heads_of_no_attention_have_no_gradients(record_error):
    given = arguments(**JOINT, joint=0.0)
    record_error(CASE.check_call(given | {"lse": given["lse"] + 80}))
    _, *gradients = CASE.results(given | {"lse": given["lse"] + INF})
    assert all(not x.any() for x in gradients)


def test_the_lse_of_the_selected_keys_is_the_default():
    given = arguments(**JOINT, leaves=())
    own = dsa.flash_mla_sparse_fwd(given["q"], given["kv"], given["indices"], given["softmax_scale"])[2].T
    assert_same_bits(CASE.run(given | {"lse": own}), CASE.run(given))


def test_nan_in_an_unselected_key_does_not_reach_a_result():
    given = small(50, 400, 200, d=576, heads=64, invalid=0.3, deterministic=True)
    given["indices"][given["indices"] == 11] = -1
    unnamed = ~torch.isin(torch.arange(400, device="cuda"), given["indices"])
    expected = CASE.results(given)
    with torch.no_grad():
        given["kv"][unnamed], given["k_idx"][unnamed] = NAN, INF
    kl, dq, dk, dw = got = CASE.results(given)
    assert_same_bits(got, expected)
    assert kl[-1] == 0 and not dk[unnamed].any() and not dq[-1].any() and not dw[-1].any()


@pytest.mark.parametrize("step", [1, 2])
def test_weights_of_zero_and_relu_at_zero_are_right(step):
    given = small(20, 300, 100)
    with torch.no_grad():
        given["w_idx"][::step], given["k_idx"][::5] = 0, 0
    CASE.check_call(given)


@pytest.mark.parametrize("size", [1, 30])
def test_all_mass_on_one_key_is_right(size):
    given = small(30, 500, 150, d=576, heads=32, scale=600.0)
    with torch.no_grad():
        given["k_idx"] *= size
    replace(CASE, check=partial(check_loss, most=0.02)).check_call(given)


def test_nan_stays_in_its_query():
    given = small(12, 200, 64)
    given["q"][3, 2, 5] = NAN
    # The gradient of k_idx is a sum over all queries. With `deterministic` the sums are integers, which cannot
    # represent NaN. So the kernel must fill the whole gradient with NaN.
    assert CASE.results(given | {"deterministic": True})[2].isnan().all()
    with torch.no_grad():
        given["q_idx"][7, 1, 9] = NAN
    kl, dq, _, dw = CASE.results(given)
    for x in (kl, dq.flatten(1).sum(1), dw.sum(1)):
        assert x.isnan().nonzero().flatten().tolist() == [3, 7]


def test_layouts_change_no_bit():
    sizes = SMALL | {"tokens": 30, "keys": 200, "k": 128, "d": 576, "heads": 64, "deterministic": True}
    check_layouts(CASE, ("q", "kv", "q_idx", "k_idx", "w_idx", "indices"), **sizes)
    given = CASE.arguments("cuda", **sizes)
    leaves, kl = [given[name] for name in INDEXER], dsa.sparse_indexer_loss(**given)
    ones = torch.ones(30, device="cuda"), torch.ones(1, device="cuda").expand(30)
    assert_same_bits(*(torch.autograd.grad(kl, leaves, x, retain_graph=True) for x in ones))


def test_only_the_order_of_k_idxs_gradient_is_free(monkeypatch):
    given = arguments(400, 600, 512, d=512, heads=64, deterministic=True)
    assert_runs_have_the_same_bits(CASE.results, given, times=10)
    (kl, dq, dk, dw), free = (CASE.results(given | {"deterministic": x}) for x in (True, False))
    assert_same_bits((free[0], free[1], free[3]), (kl, dq, dw))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert_same_bits(CASE.results(given | {"deterministic": None})[2], dk)


@pytest.mark.parametrize("size", [1e-30, 1e30, INF])
def test_deterministic_sums_of_every_size_are_right(size):
    given = small(40, 100, 64, deterministic=True)
    free, fixed = (dsa.sparse_indexer_loss(**given | {"deterministic": x}) for x in (False, True))
    grad = torch.rand(40, device="cuda")
    (expected,), (got,) = (torch.autograd.grad(x, given["k_idx"], g) for x, g in ((free, grad), (fixed, grad * size)))
    assert got.isnan().all() if size == INF else distance(got.double() / size, expected) < 0.01


def test_offsets_beyond_32_bits():
    given, first = arguments(20, 300, 128, heads=16, index_heads=8, di=64, deterministic=True), 4_000_000 - 300
    far = {"indices": given["indices"] + first}
    for name in ("kv", "k_idx"):
        far[name] = torch.empty(4_000_000, *given[name].shape[1:], device="cuda", dtype=torch.bfloat16)
        far[name][first:] = given[name].detach()
    far["k_idx"].requires_grad_()
    kl, dq, dk, dw = CASE.results(given | far)
    assert_same_bits((kl, dq, dk[first:], dw), CASE.results(given))
