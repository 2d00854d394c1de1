"""The reference of swiglu_cast_to_fp8: values by hand, NaN and infinity."""

import math

import torch

from dsa.reference import swiglu_cast_to_fp8
from tests.reference.common import INF, NAN


def test_by_hand():
    """silu(x) is x for large x, and 0 for 0 and for very negative x. So silu(gate) * up is 0, -100, 448 and 0. With a
    limit, gate and up are clamped before silu."""
    gate, up = torch.tensor([[0.0, 50.0, 100.0, -1000.0]]), torch.tensor([[9.0, -2.0, 4.48, 3.0]])
    q, scale = swiglu_cast_to_fp8(gate, up)
    assert scale.tolist() == [[1.0]] and q.float().tolist() == [[0.0, -96.0, 448.0, 0.0]]
    q, scale = swiglu_cast_to_fp8(gate, up, limit=2.0)
    two = 2 / (1 + math.exp(-2)) * 2
    assert scale.item() == 2.0 ** math.ceil(math.log2(two / 448))
    assert (q.float() * scale).tolist() == [[0.0, -3.5, 3.5, 0.0]]


def test_nan_and_infinity_stay_in_their_block():
    gate, up = torch.ones(1, 512), torch.ones(1, 512)
    gate[0, 3], up[0, 130], gate[0, 260] = NAN, INF, -INF
    q, scale = swiglu_cast_to_fp8(gate, up)
    assert scale[0, 0].isnan() and scale[0, 1] == INF and scale[0, 2].isnan() and scale[0, 3].isfinite()
    assert q[0, :128].float().isnan().all() and q[0, 130].float().isnan() and not q[0, 384:].float().isnan().any()
    limited, scale = swiglu_cast_to_fp8(gate, up, limit=1.0)
    assert scale[0, 0].isnan() and scale[0, 1].isfinite() and limited[0, 130].float() > 0
