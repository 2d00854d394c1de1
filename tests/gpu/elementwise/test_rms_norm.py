"""The RMS norm kernel on the GPU against float64."""

import math
from functools import partial
from itertools import product

import pytest
import torch

import dsa
from dsa.reference.elementwise import rms_norm as reference
from dsa.testing import assert_close, poison_free_memory
from tests.gpu.op_checks import (
    assert_compiles,
    assert_runs_have_the_same_bits,
    assert_same_bits,
    assert_same_on_the_second_gpu,
    on_a_late_stream,
    replays,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Half a unit in the last place of the result, or what fp32 loses on the way.
ROUNDING = {torch.bfloat16: 1.01 / 256, torch.float16: 1.01 / 2048, torch.float32: 2e-6}
NAN = torch.nan


def inputs(shape, dtype=torch.bfloat16, weighted=True):
    """Rows of every size."""
    size = torch.logspace(-3, 3, math.prod(shape[:-1]), device="cuda").view(*shape[:-1], 1)
    x = torch.randn(shape, device="cuda") * size
    return x.to(dtype), torch.randn(shape[-1], device="cuda") if weighted else None


def normed(x, weight, eps):
    y = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight.double()


def compare(got, x, weight, eps=1e-6):
    # fp16 has numbers below 6e-5 in steps of 6e-8.
    return assert_close("y", got, normed(x, weight, eps), abs_tol=6e-8, rel_tol=ROUNDING[x.dtype], cos_tol=5e-6)


def check(x, weight, eps=1e-6, record_error=None):
    poison_free_memory(mebibytes=64)
    got = dsa.rms_norm(x, weight, eps)
    assert got.dtype == x.dtype and got.is_contiguous() and got.device == x.device
    error = compare(got, x, weight, eps)
    if record_error:
        record_error(error)


# The ends of what each configuration holds, for 2 and for 4 bytes, and what models have.
LENGTHS = [8, 64, 72, 128, 136, 256, 264, 512, 520, 1024, 1032, 1536, 2048, 2056, 4096, 4104, 6144, 7168, 8192, 8200]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [*product(DTYPES, (*LENGTHS, 16384)), *product(DTYPES[:2], (16392, 32760, 32768))],
    ids=str,
)
def test_lengths(dtype, dim, weighted, record_error):
    check(*inputs((37, dim), dtype, weighted), record_error=record_error)


@pytest.mark.parametrize(
    "shape", [(512,), (1, 7168), (7, 1536), (4096, 1536), (16384, 7168), (4096, 64, 512), (7, 128, 64), (3, 2, 5, 64)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(dtype, shape, record_error):
    check(*inputs(shape, dtype), 1e-3, record_error)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_rows(dtype, record_error):
    base, weight = inputs((60, 8, 576), dtype)
    for x in [
        *(base[..., :512], base[..., 64:576], base[::3, ::2, :64], base[:, :3, :512], base[:, 0], base[:, :1]),
        *(base.transpose(0, 1)[..., 8:136], base[:1, :1].expand(60, 8, 576), base[:, 0].expand(2, 60, 576)),
    ]:
        check(x, weight[: x.shape[-1]], record_error=record_error)


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
        expected = reference.rms_norm(x.cpu(), weight.cpu(), eps)
        torch.testing.assert_close(dsa.rms_norm(x, weight, eps).cpu(), expected, rtol=2e-6, atol=1e-7, equal_nan=True)


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


@pytest.mark.parametrize("shape", [(1000, 7168), (1000, 64, 512)])
def test_twenty_runs_are_identical(shape):
    assert_runs_have_the_same_bits(dsa.rms_norm, *inputs(shape))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("shape", [(30, 512), (1, 8), (5000, 136), (70001, 64), (9, 5, 1536), (3000, 7168), (40, 8192)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype, shape, weighted):
    """Of rows of every size, also where a CTA has many of them, and of fp32 ones that no kernel takes; the same bits
    each time."""
    x, weight = inputs(shape, dtype, weighted)
    wanted = [t.requires_grad_() for t in (x, weight) if t is not None]
    grad = torch.randn(x.shape, device="cuda").to(dtype)
    poison_free_memory(mebibytes=64)
    got = torch.autograd.grad(dsa.rms_norm(x, weight), wanted, grad)
    exact = [t.detach().double().requires_grad_() for t in wanted]
    expected = torch.autograd.grad(normed(exact[0], exact[1] if weighted else None, 1e-6), exact, grad.double())
    # Where a row's parts cancel, the error is of their size.
    size = grad.double().norm(dim=-1, keepdim=True) / exact[0].norm(dim=-1, keepdim=True)
    if weighted:
        size = size * exact[1].abs().max()
    assert ((got[0] - expected[0]).abs() <= 2 * ROUNDING[dtype] * (expected[0].abs() + size)).all()
    if weighted:
        most = 1e-4 * math.prod(shape[:-1]) ** 0.5
        assert_close("weight", got[1], expected[1], abs_tol=most, rel_tol=1e-4, cos_tol=1e-6)
    for _ in range(5):
        assert_same_bits(torch.autograd.grad(dsa.rms_norm(x, weight), wanted, grad), got)
    with torch.no_grad():
        assert not dsa.rms_norm(x, weight).requires_grad


def test_gradients_of_parts_of_larger_tensors():
    wide = torch.randn(64, 4, 1024, device="cuda").bfloat16()
    x, weight = wide[:, 1:3, 256:768].requires_grad_(), torch.randn(512, device="cuda", requires_grad=True)
    grad = torch.randn(64, 2, 1, device="cuda").bfloat16().expand(64, 2, 512)
    got = torch.autograd.grad(dsa.rms_norm(x, weight), (x, weight), grad)
    whole = x.detach().clone().requires_grad_()
    expected = torch.autograd.grad(dsa.rms_norm(whole, weight), (whole, weight), grad)
    assert all(map(torch.equal, got, expected))


def test_gradients_of_infinite_rows_stay_theirs():
    x, weight = inputs((100, 512))
    x[7] = torch.inf
    x.requires_grad_()
    (got,) = torch.autograd.grad(dsa.rms_norm(x, weight), x, torch.ones_like(x))
    assert got[7].isnan().any() and got[torch.arange(100, device="cuda") != 7].isfinite().all()


def test_graph_replay_with_new_data():
    given = inputs((30, 7168))
    for got in replays(dsa.rms_norm, given, partial(inputs, (30, 7168))):
        compare(got, *given)


def test_side_stream():
    x, weight = inputs((4096, 7168))
    compare(on_a_late_stream(lambda: x.add_(1), dsa.rms_norm, x, weight), x, weight)


@pytest.mark.several_gpus
def test_a_tensor_on_another_gpu_than_the_current_one():
    assert_same_on_the_second_gpu(dsa.rms_norm, *inputs((40, 1536)))


def test_torch_compile():
    x, weight = inputs((40, 1536))
    assert_compiles(dsa.rms_norm, x, weight)
    assert_compiles(dsa.rms_norm, x, None)
