"""rms_norm and its gradients on the GPU: every kernel configuration, strides, and non-finite numbers."""

import math

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.cases.elementwise import ROUNDING, rms_normed
from dsa.testing import assert_close, poison_free_memory
from tests.gpu.case_checks import (
    FLOATS,
    by_dtype,
    by_sizes,
    check_far_rows,
    check_layouts,
    check_rows_alone,
    grid,
    spoiled_rows,
    verify,
)
from tests.gpu.op_checks import assert_same_bits

(CASE,) = cases_of("rms_norm")
# The longest row of each kernel configuration and the next longer one, and the row lengths of models. The
# configurations differ between dtypes of 2 and 4 bytes.
LENGTHS = [8, 64, 72, 128, 136, 256, 264, 512, 520, 1024, 1032, 1536, 2048, 2056, 4096, 4104, 6144, 7168, 8192, 8200]


@by_sizes(
    grid(shape=[(37, n) for n in (*LENGTHS, 16384)], dtype=FLOATS, weighted=(True, False)),
    grid(shape=[(37, n) for n in (16392, 32760, 32768)], dtype=FLOATS[:2], weighted=(True, False)),
    grid(
        shape=[(512,), (1, 7168), (7, 1536), (4096, 1536), (16384, 7168), (4096, 64, 512), (7, 128, 64), (3, 2, 5, 64)],
        dtype=FLOATS,
        eps=(1e-3,),
    ),
)
def test_every_length_and_shape_is_right(sizes, record_error):
    verify(CASE, sizes, record_error)


@by_dtype
@pytest.mark.parametrize("shape", [(60, 512), (60, 8, 576), (60, 8, 64)])
def test_layouts_change_no_bit(shape, dtype):
    check_layouts(CASE, ("x", "weight"), shape=shape, dtype=dtype)


@by_dtype
@pytest.mark.parametrize("dim", [128, 512, 1536, 7168])
def test_nan_stays_in_its_row(dim, dtype):
    given = CASE.arguments("cuda", shape=(40, dim), dtype=dtype)
    (got,) = spoiled_rows(CASE.run, given, {("x", 3, 5): torch.nan, ("x", 17, -1): torch.nan})
    assert got[[3, 17]].isnan().all()


def test_infinities_and_zeros_are_as_in_the_reference():
    given = CASE.arguments("cuda", shape=(6, 512), dtype=torch.float32)
    x = given["x"]
    x[1, 4], x[2, 9], x[3], x[4, 0] = torch.inf, -torch.inf, 0.0, 1e30
    for eps in (1e-6, 0.0):
        got, expected = (f.rms_norm(x, given["weight"], eps) for f in (dsa, dsa.reference))
        torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dim", [64, 512, 1536, 7168, 16384])
def test_a_row_does_not_depend_on_the_others(dim):
    given = CASE.arguments("cuda", shape=(300, dim))
    check_rows_alone(CASE.run, given, ("x",), [(0, 1), (1, 1), (2, 1), (150, 1), (299, 1), (100, 17)])


def test_offsets_beyond_32_bits():
    check_far_rows(CASE, CASE.arguments("cuda", shape=(100, 7168)), ("x",), 2**31 // 7168 + 50)


@by_dtype
@pytest.mark.parametrize("weighted", [True, False])
# The gradient kernel does not support rows of 8192 fp32 numbers. PyTorch operators compute these gradients.
@pytest.mark.parametrize("shape", [(30, 512), (1, 8), (5000, 136), (70001, 64), (9, 5, 1536), (3000, 7168), (40, 8192)])
def test_gradients_are_right_and_repeatable(shape, weighted, dtype):
    given = CASE.arguments("cuda", shape=shape, dtype=dtype, weighted=weighted)
    leaves = [x.requires_grad_() for x in (given["x"], given["weight"]) if x is not None]
    grad = torch.randn(shape, device="cuda").to(dtype)
    poison_free_memory(mebibytes=64)
    got = torch.autograd.grad(dsa.rms_norm(**given), leaves, grad)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    y = rms_normed(exact[0], exact[1] if weighted else None, given["eps"])
    expected = torch.autograd.grad(y, exact, grad.double())
    # The gradient of an element of x is a difference of two terms. If they nearly cancel, the error is relative to the
    # terms, so the tolerance includes the terms' size.
    size = grad.double().norm(dim=-1, keepdim=True) / exact[0].norm(dim=-1, keepdim=True)
    if weighted:
        size = size * exact[1].abs().max()
        most = 1e-4 * math.prod(shape[:-1]) ** 0.5
        assert_close("weight", got[1], expected[1], abs_tol=most, rel_tol=1e-4, cos_tol=1e-6)
    assert ((got[0] - expected[0]).abs() <= 2 * ROUNDING[dtype] * (expected[0].abs() + size)).all()
    for _ in range(5):
        assert_same_bits(torch.autograd.grad(dsa.rms_norm(**given), leaves, grad), got)


def test_strides_change_no_bit_of_gradients():
    wide = torch.randn(64, 4, 1024, device="cuda").bfloat16()
    part, weight = wide[:, 1:3, 256:768], torch.randn(512, device="cuda", requires_grad=True)
    grad, found = torch.randn(64, 2, 1, device="cuda").bfloat16().expand(64, 2, 512), []
    for x in (part.requires_grad_(), part.detach().clone().requires_grad_()):
        found.append(torch.autograd.grad(dsa.rms_norm(x, weight), (x, weight), grad))
    assert_same_bits(*found)


def test_gradients_of_an_infinite_row_leave_the_others_finite():
    x, weight, eps = CASE.arguments("cuda", shape=(100, 512)).values()
    x[7] = torch.inf
    x.requires_grad_()
    (got,) = torch.autograd.grad(dsa.rms_norm(x, weight, eps), x, torch.ones_like(x))
    assert got[7].isnan().any() and got[torch.arange(100, device="cuda") != 7].isfinite().all()
