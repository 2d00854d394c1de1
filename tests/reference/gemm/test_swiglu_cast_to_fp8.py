"""SwiGLU and cast: by hand, and what is not finite."""

import math

import pytest
import torch

from dsa.cases import cases_of
from dsa.reference import swiglu_cast_to_fp8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("limit", [None, 0.5, 7])
@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_against_float64(use_ue8m0, limit, dtype):
    for shape in ((2, 3, 256), (5, 200)):
        cases_of("swiglu_cast_to_fp8")[0].verify(shape=shape, use_ue8m0=use_ue8m0, limit=limit, dtype=dtype)


def test_by_hand():
    """silu(0) = 0; silu keeps a large gate; limits; h = 448 is the largest e4m3 number."""
    gate, up = torch.tensor([[0.0, 50.0, 100.0, -1000.0]]), torch.tensor([[9.0, -2.0, 4.48, 3.0]])
    q, scale = swiglu_cast_to_fp8(gate, up)
    assert scale.tolist() == [[1.0]] and q.float().tolist() == [[0.0, -96.0, 448.0, 0.0]]
    q, scale = swiglu_cast_to_fp8(gate, up, limit=2.0)
    two = 2 / (1 + math.exp(-2)) * 2
    assert scale.item() == 2.0 ** math.ceil(math.log2(two / 448))
    assert (q.float() * scale).tolist() == [[0.0, -3.5, 3.5, 0.0]]


def test_nan_and_infinity_stay_in_their_block():
    gate, up = torch.ones(1, 512), torch.ones(1, 512)
    gate[0, 3], up[0, 130], gate[0, 260] = math.nan, math.inf, -math.inf
    q, scale = swiglu_cast_to_fp8(gate, up)
    assert scale[0, 0].isnan() and scale[0, 1] == math.inf and scale[0, 2].isnan() and scale[0, 3].isfinite()
    assert q[0, :128].float().isnan().all() and q[0, 130].float().isnan() and not q[0, 384:].float().isnan().any()
    limited, scale = swiglu_cast_to_fp8(gate, up, limit=1.0)
    assert scale[0, 0].isnan() and scale[0, 1].isfinite() and limited[0, 130].float() > 0


@pytest.mark.parametrize(("shape", "groups"), [((0, 200), 2), ((3, 0), 0)])
def test_nothing_to_cast(shape, groups):
    q, scale = swiglu_cast_to_fp8(torch.zeros(shape), torch.zeros(shape))
    assert q.shape == shape and scale.shape == (shape[0], groups)
