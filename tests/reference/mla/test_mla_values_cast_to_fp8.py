"""The reference of W_UV applied to attended latents and cast: dtypes, nothing, and arguments that are refused."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import per_block_cast_to_fp8
from tests.reference.common import assert_refused

(CASE,) = cases_of("mla_values_cast_to_fp8")
SIZES = {"heads": 3, "v_dim": 256, "rows": 320, "latent": 256}  # heads begin inside of a block of 128 rows


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dtypes_are_right(dtype, use_ue8m0):
    CASE.verify(**SIZES, dtype=dtype, use_ue8m0=use_ue8m0)


@pytest.mark.parametrize("tokens, heads", [(0, 3), (3, 0)])
def test_without_tokens_or_heads_there_are_no_values(tokens, heads):
    q, scale = dsa.mla_values_cast_to_fp8(**CASE.arguments(**SIZES | {"tokens": tokens, "heads": heads}))
    assert q.shape == (tokens, heads * 256) and scale.shape == (tokens, heads * 2)


@pytest.mark.parametrize(
    ("v_dim", "rows", "message"),
    [
        (200, 960, "v_dim: must be a multiple of 128, got 200"),
        (256, 961, r"kv_b\[0\]: rows must be a multiple of the 3 heads of attended, got 961"),
        (384, 960, r"kv_b\[0\]: must have at least 384 rows a head, got 960 for 3 heads"),
    ],
)
def test_wrong_arguments_are_named(v_dim, rows, message):
    kv_b = per_block_cast_to_fp8(torch.randn(rows, 256))
    assert_refused(message, dsa.mla_values_cast_to_fp8, **CASE.arguments(**SIZES) | {"kv_b": kv_b, "v_dim": v_dim})
