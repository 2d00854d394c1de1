"""The norm's kernels with lengths, shapes, strides and numbers that its case leaves out, and their gradients."""

import math
from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.elementwise import ROUNDING, rms_normed
from dsa.testing import assert_close, poison_free_memory
from tests.gpu.op_checks import assert_same_bits

(CASE,) = cases_of("rms_norm")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NAN = torch.nan
# The longest rows of each configuration, for 2 and for 4 bytes, and the lengths of models.
LENGTHS = [8, 64, 72, 128, 136, 256, 264, 512, 520, 1024, 1032, 1536, 2048, 2056, 4096, 4104, 6144, 7168, 8192, 8200]


def inputs(shape, dtype=torch.bfloat16, weighted=True):
    given = CASE.arguments("cuda", shape=shape, dtype=dtype, weighted=weighted)
    return given["x"], given["weight"]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [*product(DTYPES, (*LENGTHS, 16384)), *product(DTYPES[:2], (16392, 32760, 32768))],
    ids=str,
)
def test_lengths(dtype, dim, weighted, record_error):
    poison_free_memory(mebibytes=64)
    record_error(CASE.verify("cuda", shape=(37, dim), dtype=dtype, weighted=weighted))


@pytest.mark.parametrize(
    "shape", [(512,), (1, 7168), (7, 1536), (4096, 1536), (16384, 7168), (4096, 64, 512), (7, 128, 64), (3, 2, 5, 64)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(dtype, shape, record_error):
    poison_free_memory(mebibytes=64)
    record_error(CASE.verify("cuda", shape=shape, dtype=dtype, eps=1e-3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows(dtype, record_error):
    base, weight = inputs((60, 8, 576), dtype)
    for x in [
        *(base[..., :512], base[..., 64:576], base[::3, ::2, :64], base[:, :3, :512], base[:, 0], base[:, :1]),
        *(base.transpose(0, 1)[..., 8:136], base[:1, :1].expand(60, 8, 576), base[:, 0].expand(2, 60, 576)),
    ]:
        record_error(CASE.check_call({"x": x, "weight": weight[: x.shape[-1]], "eps": 1e-6}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [128, 512, 1536, 7168])
def test_nan_stays_in_its_row(dim, dtype):
    x, weight = inputs((40, dim), dtype)
    whole = dsa.rms_norm(x, weight)
    x[3, 5], x[17, -1] = NAN, NAN
    got = dsa.rms_norm(x, weight)
    others = [i for i in range(40) if i not in (3, 17)]
    assert got[[3, 17]].isnan().all() and torch.equal(got[others], whole[others])


def test_infinities_and_zeros_are_as_in_the_reference():
    x, weight = inputs((6, 512), torch.float32)
    x[1, 4], x[2, 9], x[3], x[4, 0] = torch.inf, -torch.inf, 0.0, 1e30
    for eps in (1e-6, 0.0):
        expected = dsa.reference.rms_norm(x, weight, eps)
        torch.testing.assert_close(dsa.rms_norm(x, weight, eps), expected, rtol=2e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dim", [64, 512, 1536, 7168, 16384])
def test_a_row_does_not_depend_on_the_others(dim):
    x, weight = inputs((300, dim))
    whole = dsa.rms_norm(x, weight)
    assert all(torch.equal(dsa.rms_norm(x[i], weight), whole[i]) for i in (0, 1, 2, 150, 299))
    assert torch.equal(dsa.rms_norm(x[100:117], weight), whole[100:117])


def test_offsets_beyond_32_bits():
    rows = 2**31 // 7168 + 50
    x = torch.zeros(rows, 7168, dtype=torch.bfloat16, device="cuda")
    some, weight = inputs((100, 7168))
    x[-100:] = some
    got = dsa.rms_norm(x, weight)
    assert torch.equal(got[-100:], dsa.rms_norm(some, weight)) and not got[:-100].any()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(30, 512), (1, 8), (5000, 136), (70001, 64), (9, 5, 1536), (3000, 7168), (40, 8192)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype, shape, weighted):
    """Rows of every size, more rows than CTAs, and fp32 rows that no kernel takes; six runs have the same bits."""
    x, weight = inputs(shape, dtype, weighted)
    wanted = [t.requires_grad_() for t in (x, weight) if t is not None]
    grad = torch.randn(x.shape, device="cuda").to(dtype)
    poison_free_memory(mebibytes=64)
    got = torch.autograd.grad(dsa.rms_norm(x, weight), wanted, grad)
    exact = [t.detach().double().requires_grad_() for t in wanted]
    expected = torch.autograd.grad(rms_normed(exact[0], exact[1] if weighted else None, 1e-6), exact, grad.double())
    # Where the parts of a row cancel, the error is relative to these parts.
    size = grad.double().norm(dim=-1, keepdim=True) / exact[0].norm(dim=-1, keepdim=True)
    if weighted:
        size = size * exact[1].abs().max()
        most = 1e-4 * math.prod(shape[:-1]) ** 0.5
        assert_close("weight", got[1], expected[1], abs_tol=most, rel_tol=1e-4, cos_tol=1e-6)
    assert ((got[0] - expected[0]).abs() <= 2 * ROUNDING[dtype] * (expected[0].abs() + size)).all()
    for _ in range(5):
        assert_same_bits(torch.autograd.grad(dsa.rms_norm(x, weight), wanted, grad), got)


def test_gradients_of_parts_of_larger_tensors():
    wide = torch.randn(64, 4, 1024, device="cuda").bfloat16()
    x, weight = wide[:, 1:3, 256:768].requires_grad_(), torch.randn(512, device="cuda", requires_grad=True)
    grad = torch.randn(64, 2, 1, device="cuda").bfloat16().expand(64, 2, 512)
    got = torch.autograd.grad(dsa.rms_norm(x, weight), (x, weight), grad)
    whole = x.detach().clone().requires_grad_()
    expected = torch.autograd.grad(dsa.rms_norm(whole, weight), (whole, weight), grad)
    assert_same_bits(got, expected)


def test_gradients_of_an_infinite_row_leave_the_others_finite():
    x, weight = inputs((100, 512))
    x[7] = torch.inf
    x.requires_grad_()
    (got,) = torch.autograd.grad(dsa.rms_norm(x, weight), x, torch.ones_like(x))
    assert got[7].isnan().any() and got[torch.arange(100, device="cuda") != 7].isfinite().all()
