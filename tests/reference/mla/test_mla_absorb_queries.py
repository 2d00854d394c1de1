"""The references of mla_absorb_queries and mla_values_cast_to_fp8: rounding of the weight, no tokens, and no heads."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.reference import mla_absorb_queries
from tests.reference.common import BF16, E4M3, F32

(ABSORB,), (VALUES,) = cases_of("mla_absorb_queries"), cases_of("mla_values_cast_to_fp8")


@pytest.mark.parametrize(("dtype", "expected"), [(BF16, 1.0), (F32, 1 + 2**-10)])
def test_the_weight_is_rounded_before_it_is_multiplied(dtype, expected):
    """In bf16, a weight of 1 with a scale of 1 + 2^-10 is rounded to 1."""
    kv_b = torch.ones(2, 128).to(E4M3), torch.full((1, 1), 1 + 2**-10)
    q_nope, q_pe, angles = torch.ones(1, 1, 1).to(dtype), torch.zeros(1, 1, 0).to(dtype), torch.zeros(1, 0)
    assert (mla_absorb_queries(q_nope, q_pe, angles, angles, kv_b) == expected).all()


@pytest.mark.parametrize(("tokens", "heads"), [(0, 3), (3, 0)])
def test_without_tokens_or_heads_there_are_no_results(tokens, heads):
    sizes = {"tokens": tokens, "heads": heads, "latent": 256}
    (absorbed,) = ABSORB.run(ABSORB.arguments(**sizes, nope=64, rows=160))
    q, scale = VALUES.run(VALUES.arguments(**sizes, v_dim=256, rows=320))
    assert absorbed.shape == (tokens, heads, 320)
    assert q.shape == (tokens, 256 * heads) and scale.shape == (tokens, 2 * heads)
