"""The reference of W_UK absorbed into the queries: dtypes, rounded weights, nothing, and refused weights."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import mla_absorb_queries, per_block_cast_to_fp8
from tests.reference.common import assert_refused

(CASE,) = cases_of("mla_absorb_queries")
SIZES = {"heads": 4, "nope": 64, "rows": 160, "latent": 256}  # heads begin inside of a block of 128 rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_dtypes_are_right(dtype):
    CASE.verify(**SIZES, dtype=dtype)


def test_the_weight_is_rounded_before_it_is_multiplied():
    """A weight of 1 with a scale of 1 + 2^-10 is 1 in bf16."""
    kv_b = torch.ones(2, 128).to(torch.float8_e4m3fn), torch.full((1, 1), 1 + 2**-10)
    q_nope, q_pe, angles = torch.ones(1, 1, 1), torch.zeros(1, 1, 0), torch.zeros(1, 0)
    for dtype, expected in ((torch.bfloat16, 1.0), (torch.float32, 1 + 2**-10)):
        got = mla_absorb_queries(q_nope.to(dtype), q_pe.to(dtype), angles, angles, kv_b)
        assert (got == expected).all()


@pytest.mark.parametrize("tokens, heads", [(0, 4), (3, 0)])
def test_without_tokens_or_heads_there_are_no_queries(tokens, heads):
    given = CASE.arguments(**SIZES | {"tokens": tokens, "heads": heads})
    assert dsa.mla_absorb_queries(**given).shape == (tokens, heads, 320)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (642, r"kv_b\[0\]: rows must be a multiple of the 4 heads of q_nope, got 642"),
        (128, r"kv_b\[0\]: must have at least 64 rows a head, got 128 for 4 heads"),
    ],
)
def test_rows_that_are_not_the_heads_are_refused(rows, message):
    kv_b = per_block_cast_to_fp8(torch.randn(rows, 256))
    assert_refused(message, dsa.mla_absorb_queries, **CASE.arguments(**SIZES) | {"kv_b": kv_b})
