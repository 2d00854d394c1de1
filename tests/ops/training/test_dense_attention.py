"""What the bridge of dense attention refuses before anything is launched."""

import re

import pytest
import torch

from dsa.ops.training import _dense_attention as op

BF16 = torch.bfloat16


def arguments(**changed):
    q, k, v = torch.zeros(5, 4, 128, dtype=BF16), torch.zeros(6, 2, 128, dtype=BF16), torch.zeros(6, 2, 128, dtype=BF16)
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": torch.tensor([0, 5]).int(), "softmax_scale": 0.1}
    given |= {"cu_seqlens_k": torch.tensor([0, 6]).int()}
    return given | changed


def test_what_is_taken():
    op.check(**arguments())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(5, 128, dtype=BF16)}, "q: must be [tokens, heads, channels], got shape [5, 128]"),
        ({"q": torch.zeros(5, 3, 128, dtype=BF16)}, "q: heads must be a multiple of k's 2, got 3"),
        ({"q": torch.zeros(5, 4, 96, dtype=BF16)}, "q, k, v: channels (d, d, dv) must be"),
        ({"v": torch.zeros(6, 2, 64, dtype=BF16)}, "q, k, v: channels (d, d, dv) must be"),
        ({"v": torch.zeros(7, 2, 128, dtype=BF16)}, "v: must have k's tokens and heads [6, 2], got [7, 2]"),
        ({"cu_seqlens_k": torch.tensor([0, 3, 6]).int()}, "cu_seqlens_k: must be [B + 1]"),
        ({"softmax_scale": 0.0}, "softmax_scale: must be positive and finite, got 0.0"),
        ({"softmax_scale": float("nan")}, "softmax_scale: must be positive and finite, got nan"),
    ],
)
def test_values(changed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        op.check(**arguments(**changed))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": torch.zeros(5, 4, 128)}, "q: must be bfloat16 or float16, and all the same, got torch.float32"),
        ({"k": torch.zeros(6, 2, 128, dtype=torch.float16)}, "k: must be bfloat16 or float16, and all the same"),
        ({"cu_seqlens_q": torch.tensor([0, 5])}, "cu_seqlens_q: must be int32, got torch.int64"),
    ],
)
def test_types(changed, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        op.check(**arguments(**changed))
