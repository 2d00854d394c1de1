"""The reference of products with FP4 weights: results have the same bits as with the weights widened to FP8, and
weights that FP8 cannot represent are refused."""

import re

import pytest

from dsa.cases import cases_of
from dsa.reference.gemm import fp8_fp4_gemm_nt as module
from tests.reference.common import BF16, BYTE, F32, assert_refused

CASE, *_ = cases_of("fp8_fp4_gemm_nt")


@pytest.mark.parametrize(("columns", "channels"), [(128, 128), (140, 160), (8, 32), (256, 320)])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("tokens", [0, 7])
@pytest.mark.parametrize("sizes", [[2, 0, 5], [0, 5, 1], [0, 0, 0]])
def test_products_have_the_bits_of_the_widened_weights(sizes, columns, channels, tokens, dtype):
    sizes = {"sizes": sizes, "tokens": tokens, "columns": columns, "channels": channels, "after": 2}
    given = CASE.arguments(**sizes, out_dtype=dtype, weighted=tokens > 0)
    (got,), (packed, *scales) = CASE.run(given), given["b"]
    CASE.check(given, [got])
    assert CASE.run(given | {"b": (packed.char(), *scales)})[0][:-2].equal(got[:-2])
    assert got.dtype == dtype and got[-2:].isnan().all() and not got[:-2].isnan().any()


def test_only_weights_with_rows_are_widened(monkeypatch):
    seen = []
    right = module.widen_matrix
    monkeypatch.setattr(module, "widen_matrix", lambda p, s, place: (seen.append(place), right(p, s, place))[1])
    CASE.run(CASE.arguments(sizes=[2, 0, 5]))
    assert seen == [(0,), (2,)]


def double_a_block_scale(packed, scale, block_scale):
    block_scale[2, 1, 0] *= 2


def write_a_nan(packed, scale, block_scale):
    scale.view(BYTE)[2, 5, 1] = 255


def spread_a_block(packed, scale, block_scale):
    scale.view(BYTE)[2, 130, 4], packed[2, 130, 64:] = 127 - 40, 0x11


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (double_a_block_scale, "b[2]: must be fp4_block_scales(b[0], b[1]), "),
        (write_a_nan, "b: scale[2, 5, 1] is NaN"),
        (spread_a_block, "b: block [2, 1, 1] of 128 x 128: its groups' scales go from 2^-40"),
    ],
)
def test_weights_that_fp8_cannot_hold_are_refused(damage, message):
    given = CASE.arguments(sizes=[2, 0, 5], columns=140)
    damage(*given["b"])
    assert_refused(re.escape(message), CASE.run, given)
