"""The norm with a cast, with lengths, strides and numbers that its cases leave out."""

from itertools import product

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.testing import poison_free_memory
from tests.gpu.op_checks import assert_equal

PLAIN, ADDED = cases_of("rms_norm_cast")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# The longest rows of each configuration, and the lengths of models.
LENGTHS = [128, 256, 384, 512, 640, 1024, 1152, 1536, 2048, 2176, 4096, 4224, 6144, 7168, 8192]


def verify(record_error, **sizes):
    for case in (PLAIN, ADDED):
        poison_free_memory(mebibytes=64)
        record_error(case.verify("cuda", **sizes))


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize(
    ("dtype", "channels"), [*product(DTYPES, LENGTHS), *product(DTYPES[:2], (8320, 16384))], ids=str
)
def test_lengths(dtype, channels, use_ue8m0, record_error):
    verify(record_error, channels=channels, dtype=dtype, eps=1e-3, use_ue8m0=use_ue8m0)


@pytest.mark.parametrize("tokens", [1, 2, 5, 4096])
def test_tokens(tokens, record_error):
    verify(record_error, tokens=tokens, channels=7168)


def check(given, x, residual, **options):
    weight = given["weight"][: x.shape[1]]
    ADDED.check_call(given | {"x": x, "residual": residual, "weight": weight} | options)
    PLAIN.check_call({"x": x, "weight": weight, "eps": given["eps"], "use_ue8m0": given["use_ue8m0"]} | options)


def test_strided_rows():
    given = ADDED.arguments("cuda", tokens=60, channels=1024)
    x, residual = given["x"], given["residual"]
    check(given, x[::3, :512], residual[:20, 256:768])
    check(given, x[:20, 8:520], residual[40:, 512:])


def test_nan_and_infinity_are_where_the_two_ops_have_them():
    given = ADDED.arguments("cuda", tokens=40, channels=1536)
    x, residual = given["x"], given["residual"]
    x[3, 5], x[17, -1], residual[21, 0] = torch.nan, torch.inf, torch.nan
    check(given, x, residual)


def test_zeros():
    given = ADDED.arguments("cuda", tokens=6, channels=512)
    x, residual = torch.zeros_like(given["x"]), given["residual"]
    check(given, x, torch.zeros_like(residual), eps=0.0, use_ue8m0=True)
    check(given, x, residual)


def test_offsets_beyond_32_bits():
    rows = 2**31 // 7168 + 50
    x = torch.zeros(rows, 7168, dtype=torch.bfloat16, device="cuda")
    some, weight, *_ = PLAIN.arguments("cuda", tokens=100, channels=7168).values()
    x[-100:] = some
    got = dsa.rms_norm_cast_to_fp8(x, weight)
    assert_equal([t[-100:] for t in got], dsa.rms_norm_cast_to_fp8(some, weight))
    del got
    total, *_ = dsa.add_rms_norm_cast_to_fp8(x[-200:], x[-200:], weight)
    assert torch.equal(total[-100:], some + some)
