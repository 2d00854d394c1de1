import math

import pytest
import torch

from dsa.reference import per_token_cast_to_fp8, swiglu_cast_to_fp8
from tests.reference.common import assert_same_bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("limit", [None, 0.5, 7])
@pytest.mark.parametrize("use_ue8m0", [True, False])
def test_is_the_cast_of_the_product(use_ue8m0, limit, dtype):
    gate, up = (3 * torch.randn(2, 3, 512)).to(dtype).chunk(2, -1)
    most = math.inf if limit is None else limit
    h = torch.nn.functional.silu(gate.double().clamp(max=most)) * up.double().clamp(-most, most)
    q, scale = swiglu_cast_to_fp8(gate, up, use_ue8m0, limit=limit)
    assert q.shape == (2, 3, 256) and q.dtype == torch.float8_e4m3fn and scale.shape == (2, 3, 2)
    back = q.double() * scale.repeat_interleave(128, -1)
    torch.testing.assert_close(back, h, rtol=0.07, atol=2e-2)
    if limit is None:
        assert_same_bits(
            (q, scale), per_token_cast_to_fp8((torch.nn.functional.silu(gate.float()) * up).to(dtype), use_ue8m0)
        )


def test_by_hand():
    """silu(0) = 0; a large gate is kept; limits; h = 448 is the largest e4m3."""
    gate, up = torch.tensor([[0.0, 50.0, 100.0, -1000.0]]), torch.tensor([[9.0, -2.0, 4.48, 3.0]])
    q, scale = swiglu_cast_to_fp8(gate, up)
    assert scale.tolist() == [[1.0]] and q.float().tolist() == [[0.0, -96.0, 448.0, 0.0]]
    q, scale = swiglu_cast_to_fp8(gate, up, limit=2.0)
    two = 2 / (1 + math.exp(-2)) * 2
    assert scale.item() == 2.0 ** math.ceil(math.log2(two / 448))
    assert (q.float() * scale).tolist() == [[0.0, -3.5, 3.5, 0.0]]


def test_a_last_block_that_ends_early():
    gate, up = torch.randn(5, 200), torch.randn(5, 200)
    q, scale = swiglu_cast_to_fp8(gate, up, False)
    assert q.shape == (5, 200) and q.is_contiguous() and scale.shape == (5, 2)
    padded = [torch.nn.functional.pad(x, (0, 56)) for x in (gate, up)]
    whole, whole_scale = swiglu_cast_to_fp8(*padded, False)
    assert_same_bits((q, scale), (whole[:, :200], whole_scale))


def test_nan_and_infinity_stay_in_their_block():
    gate, up = torch.ones(1, 512), torch.ones(1, 512)
    gate[0, 3], up[0, 130], gate[0, 260] = math.nan, math.inf, -math.inf
    q, scale = swiglu_cast_to_fp8(gate, up)
    assert scale[0, 0].isnan() and scale[0, 1] == math.inf and scale[0, 2].isnan() and scale[0, 3].isfinite()
    assert q[0, :128].float().isnan().all() and q[0, 130].float().isnan() and not q[0, 384:].float().isnan().any()
    limited, scale = swiglu_cast_to_fp8(gate, up, limit=1.0)
    assert scale[0, 0].isnan() and scale[0, 1].isfinite() and limited[0, 130].float() > 0


@pytest.mark.parametrize(("shape", "groups"), [((0, 200), 2), ((3, 0), 0)])
def test_nothing(shape, groups):
    q, scale = swiglu_cast_to_fp8(torch.zeros(shape), torch.zeros(shape))
    assert q.shape == shape and scale.shape == (shape[0], groups)
