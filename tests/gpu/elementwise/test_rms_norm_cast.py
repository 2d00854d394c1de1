"""The norm with a cast on the GPU: the bits of the norm, of the cast and of PyTorch's sum."""

from functools import partial
from itertools import product

import pytest
import torch

import dsa
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import (
    assert_equal,
    assert_runs_have_the_same_bits,
    assert_same_on_the_second_gpu,
    on_a_late_stream,
    replays,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# The ends of what each configuration holds, and what models have.
LENGTHS = [256, 384, 512, 640, 1024, 1152, 1536, 2048, 2176, 4096, 4224, 6144, 7168, 8192]


def inputs(tokens, channels, dtype=torch.bfloat16):
    """Rows of every size."""
    size = torch.logspace(-3, 3, max(tokens, 1), device="cuda")[:tokens, None]
    x, residual = (torch.randn(tokens, channels, device="cuda") * size for _ in range(2))
    return x.to(dtype), residual.to(dtype), torch.randn(channels, device="cuda")


def norm_and_cast(x, weight, eps=1e-6, use_ue8m0=True):
    y = dsa.rms_norm(x, weight, eps)
    return y, *dsa.per_token_cast_to_fp8(y, use_ue8m0)


def sum_norm_and_cast(x, residual, weight, eps=1e-6, use_ue8m0=True):
    total = residual + x
    return total, *norm_and_cast(total, weight, eps, use_ue8m0)


def check(x, residual, weight, eps=1e-6, use_ue8m0=True):
    poison_free_memory(mebibytes=64)
    plain = dsa.rms_norm_cast_to_fp8(x, weight, eps, use_ue8m0)
    added = dsa.add_rms_norm_cast_to_fp8(x, residual, weight, eps, use_ue8m0)
    assert_equal(plain, norm_and_cast(x, weight, eps, use_ue8m0))
    assert_equal(added, sum_norm_and_cast(x, residual, weight, eps, use_ue8m0))
    assert all(result.is_contiguous() for result in (*plain, *added))


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize(
    ("dtype", "channels"), [*product(DTYPES, LENGTHS), *product(DTYPES[:2], (8320, 16384))], ids=str
)
def test_lengths(dtype, channels, use_ue8m0):
    check(*inputs(37, channels, dtype), 1e-3, use_ue8m0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_group(dtype):
    """Summed in another order than the norm alone does it."""
    x, _, weight = inputs(40, 128, dtype)
    y, q, scale = dsa.rms_norm_cast_to_fp8(x, weight)
    torch.testing.assert_close(y, dsa.rms_norm(x, weight), rtol=2e-6 if dtype == torch.float32 else 2**-7, atol=1e-7)
    assert_equal((q, scale), dsa.per_token_cast_to_fp8(y))


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 4096])
def test_tokens(tokens):
    check(*inputs(tokens, 7168))


def test_strided_rows():
    x, residual, weight = inputs(60, 1024)
    check(x[::3, :512], residual[:20, 256:768], weight[:512])
    check(x[:20, 8:520], residual[40:, 512:], weight[:512])


def test_bits_of_nan_and_infinity():
    x, residual, weight = inputs(40, 1536)
    x[3, 5], x[17, -1], residual[21, 0] = torch.nan, torch.inf, torch.nan
    check(x, residual, weight)


def test_zeros():
    x, residual, weight = inputs(6, 512)
    check(torch.zeros_like(x), torch.zeros_like(residual), weight, 0.0)
    check(torch.zeros_like(x), residual, weight, 1e-6, False)


def test_offsets_beyond_32_bits():
    rows = 2**31 // 7168 + 50
    x = torch.zeros(rows, 7168, dtype=torch.bfloat16, device="cuda")
    some, _, weight = inputs(100, 7168)
    x[-100:] = some
    got = dsa.rms_norm_cast_to_fp8(x, weight)
    assert_equal([t[-100:] for t in got], dsa.rms_norm_cast_to_fp8(some, weight))
    del got
    total, *_ = dsa.add_rms_norm_cast_to_fp8(x[-200:], x[-200:], weight)
    assert torch.equal(total[-100:], some + some)


def test_twenty_runs_are_identical():
    assert_runs_have_the_same_bits(dsa.add_rms_norm_cast_to_fp8, *inputs(1000, 7168))


def test_graph_replay_with_new_data():
    given = inputs(30, 7168)
    for got in replays(dsa.add_rms_norm_cast_to_fp8, given, partial(inputs, 30, 7168)):
        assert_equal(got, sum_norm_and_cast(*given))


def test_side_stream():
    x, residual, weight = inputs(4096, 7168)
    got = on_a_late_stream(lambda: x.add_(1), dsa.add_rms_norm_cast_to_fp8, x, residual, weight)
    assert_equal(got, sum_norm_and_cast(x, residual, weight))


@pytest.mark.several_gpus
def test_tensors_on_another_gpu_than_the_current_one():
    assert_same_on_the_second_gpu(dsa.add_rms_norm_cast_to_fp8, *inputs(40, 1536))
