"""The sparse stage's loss and its gradients against float64, on the GPU."""

from dataclasses import replace

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.training import INDEXER, check_loss, distance, gradients_of, sparse_kl, with_leaves
from dsa.testing import poison_free_memory
from tests.gpu.attention import INF, NAN
from tests.gpu.op_checks import among_nan, assert_runs_have_the_same_bits, assert_same_bits

CASE = replace(*cases_of("sparse_indexer_loss"), sizes={})


def arguments(tokens, keys, k, **sizes):
    return CASE.arguments("cuda", tokens=tokens, keys=keys, k=k, **sizes)


def small(tokens, keys, k, **sizes):
    return arguments(tokens, keys, k, **{"d": 512, "heads": 16, "index_heads": 16, "di": 64} | sizes)


def check(given, record_error=None, most=0.012):
    poison_free_memory(mebibytes=64)
    error = check_loss(given, CASE.results(given), most)
    if record_error:
        record_error(error)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "d, heads, k, index_heads, di",
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
def test_shapes(d, heads, k, index_heads, di, deterministic, record_error):
    sizes = {"d": d, "heads": heads, "index_heads": index_heads, "di": di}
    check(arguments(140, 3000, k, **sizes, deterministic=deterministic), record_error)


@pytest.mark.parametrize("tokens", [1, 2, 131, 300])
@pytest.mark.parametrize("k", [1, 2, 63, 64, 65, 129, 200])
def test_sizes(tokens, k, record_error):
    check(arguments(tokens, 77, k, d=512, heads=16, index_heads=8, di=64), record_error)
    check(arguments(tokens, 300, k, d=576, heads=80, index_heads=20, di=64), record_error)


@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d, heads, k", [(576, 128, 1024), (512, 64, 512)])
def test_gradients_are_as_near_as_autograds_in_bf16(d, heads, k, w_dtype):
    given = arguments(64, 2000, k, d=d, heads=heads, w_dtype=w_dtype)
    exact, rough = with_leaves(given, torch.float64), with_leaves(given, torch.bfloat16)
    expected, theirs = (gradients_of([sparse_kl(x)], x) for x in (exact, rough))
    for name, x, other, right in zip(INDEXER, CASE.results(given)[1:], theirs, expected, strict=True):
        error, most = distance(x, right), 2 * distance(other, right)
        assert error < most, f"{name}: {error}, autograd in bf16 {most / 2}"


@pytest.mark.parametrize("joint", [0.0, 40.0])
def test_a_joint_lse(joint, record_error):
    """Heads give the selected keys between all and e^-40 of their attention."""
    check(arguments(40, 900, 192, d=512, heads=64, joint=joint), record_error)


def test_heads_of_no_attention_have_no_gradients(record_error):
    given = arguments(40, 900, 192, d=512, heads=64, joint=0.0)
    check(given | {"lse": given["lse"] + 80}, record_error)
    _, *gradients = CASE.results(given | {"lse": given["lse"] + INF})
    assert all(not x.any() for x in gradients)


def test_the_lse_of_the_selected_keys_is_the_default():
    given = arguments(40, 900, 192, d=512, heads=64, leaves=())
    own = dsa.flash_mla_sparse_fwd(given["q"], given["kv"], given["indices"], given["softmax_scale"])[2].T
    assert_same_bits(CASE.run(given | {"lse": own}), CASE.run(given))


def test_what_no_index_names_reaches_nothing(record_error):
    """Invalid indices and keys named twice; NaN in rows that none names."""
    given = small(50, 400, 200, d=576, heads=64, invalid=0.3, deterministic=True)
    indices = given["indices"]
    indices[1, 0, 5:], indices[2, 0, :-1] = -(2**31), 400
    indices[3, 0, 100:] = 2**31 - 1
    indices[4, 0, 150:] = indices[4, 0, 1]
    check(given, record_error)
    indices[indices == 11] = -1
    unnamed = torch.ones(400, device="cuda", dtype=torch.bool)
    unnamed[indices[(indices >= 0) & (indices < 400)].long()] = False
    expected = CASE.results(given)
    with torch.no_grad():
        given["kv"][unnamed], given["k_idx"][unnamed] = NAN, INF
    kl, dq, dk, dw = got = CASE.results(given)
    assert_same_bits(got, expected)
    assert kl[-1] == 0 and not dk[unnamed].any() and not dq[-1].any() and not dw[-1].any()


def test_weights_of_zero_and_relu_at_zero():
    given = small(20, 300, 100)
    with torch.no_grad():
        given["w_idx"][::2], given["k_idx"][::5] = 0, 0
    check(given)
    with torch.no_grad():
        given["w_idx"].zero_()
    _, dq, dk, dw = CASE.results(given)
    assert not dq.any() and not dk.any() and dw.any()


@pytest.mark.parametrize("size", [1, 30])
def test_all_mass_on_one_key(size):
    given = small(30, 500, 150, d=576, heads=32, scale=600.0)
    with torch.no_grad():
        given["k_idx"] *= size
    check(given, most=0.02)


def test_nan_reaches_its_query_only():
    given = small(12, 200, 64)
    given["q"][3, 2, 5] = NAN
    # k_idx's gradient is that of all queries. Only d_scores has NaN here, and sums of integers cannot have it.
    assert CASE.results(given | {"deterministic": True})[2].isnan().all()
    with torch.no_grad():
        given["q_idx"][7, 1, 9] = NAN
    kl, dq, _, dw = CASE.results(given)
    for x in (kl, dq.flatten(1).sum(1), dw.sum(1)):
        assert x.isnan().nonzero().flatten().tolist() == [3, 7]


def test_strides_change_no_bit():
    given = small(30, 200, 128, d=576, heads=64, deterministic=True)
    names = ("q", "kv", "q_idx", "k_idx", "w_idx")
    wide = {name: among_nan(given[name].detach()).requires_grad_(name in INDEXER) for name in names}
    q_idx = given["q_idx"].detach().transpose(0, 1)
    wide["q_idx"] = among_nan(q_idx).transpose(0, 1).requires_grad_()
    wide["indices"] = torch.nn.functional.pad(given["indices"], (8, 24))[..., 8:-24]
    expected = CASE.results(given)
    assert_same_bits(CASE.results(given | wide), expected)
    odd = among_nan(given["q"], 0, 1)  # rows at no multiple of 16 bytes
    assert_same_bits(CASE.results(given | {"q": odd}), expected)
    leaves, kl = [given[name] for name in INDEXER], dsa.sparse_indexer_loss(**given)
    ones = torch.ones(30, device="cuda"), torch.ones(1, device="cuda").expand(30)
    assert_same_bits(*(torch.autograd.grad(kl, leaves, x, retain_graph=True) for x in ones))


def test_only_the_order_of_k_idxs_gradient_is_free():
    given = arguments(400, 600, 512, d=512, heads=64, deterministic=True)
    assert_runs_have_the_same_bits(CASE.results, given, times=10)
    kl, dq, dk, dw = CASE.results(given)
    free = CASE.results(given | {"deterministic": False})
    assert_same_bits((free[0], free[1], free[3]), (kl, dq, dw))
    torch.use_deterministic_algorithms(True)
    try:
        assert_same_bits(CASE.results(given | {"deterministic": None})[2], dk)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("size", [1e-30, 1e30, INF])
def test_deterministic_sums_of_every_size(size):
    given = small(40, 100, 64, deterministic=True)
    free, fixed = (dsa.sparse_indexer_loss(**given | {"deterministic": x}) for x in (False, True))
    grad = torch.rand(40, device="cuda")
    (expected,), (got,) = (torch.autograd.grad(x, given["k_idx"], g) for x, g in ((free, grad), (fixed, grad * size)))
    assert got.isnan().all() if size == INF else distance(got.double() / size, expected) < 0.01


def test_offsets_beyond_32_bits():
    """kv of 2.3e9 numbers, and indices at its end."""
    given = arguments(20, 300, 128, heads=16, index_heads=8, di=64, deterministic=True)
    first = 4_000_000 - 300
    large = torch.empty(4_000_000, 1, 576, device="cuda", dtype=torch.bfloat16)
    large_idx = torch.empty(4_000_000, 64, device="cuda", dtype=torch.bfloat16)
    large[first:], large_idx[first:] = given["kv"], given["k_idx"].detach()
    far = {"kv": large, "k_idx": large_idx.requires_grad_(), "indices": given["indices"] + first}
    kl, dq, dk, dw = CASE.results(given | far)
    assert_same_bits((kl, dq, dk[first:], dw), CASE.results(given))
