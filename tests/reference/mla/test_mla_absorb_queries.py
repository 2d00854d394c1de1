"""The references of products with kv_b: rounded weights, and no heads."""

import pytest
import torch

import dsa
from dsa.cases import cases_of
from dsa.reference import mla_absorb_queries
from tests.reference.common import BF16, E4M3, F32

(ABSORB,), (VALUES,) = cases_of("mla_absorb_queries"), cases_of("mla_values_cast_to_fp8")


@pytest.mark.parametrize(("dtype", "expected"), [(BF16, 1.0), (F32, 1 + 2**-10)])
def test_the_weight_is_rounded_before_it_is_multiplied(dtype, expected):
    """A weight of 1 with a scale of 1 + 2^-10 is 1 in bf16."""
    kv_b = torch.ones(2, 128).to(E4M3), torch.full((1, 1), 1 + 2**-10)
    q_nope, q_pe, angles = torch.ones(1, 1, 1).to(dtype), torch.zeros(1, 1, 0).to(dtype), torch.zeros(1, 0)
    assert (mla_absorb_queries(q_nope, q_pe, angles, angles, kv_b) == expected).all()


def test_without_heads_there_are_no_results():
    absorbed = dsa.mla_absorb_queries(**ABSORB.arguments(tokens=3, heads=0, nope=64, rows=160, latent=256))
    q, scale = dsa.mla_values_cast_to_fp8(**VALUES.arguments(tokens=3, heads=0, v_dim=256, rows=320, latent=256))
    assert (absorbed.shape, q.shape, scale.shape) == ((3, 0, 320), (3, 0), (3, 0))
