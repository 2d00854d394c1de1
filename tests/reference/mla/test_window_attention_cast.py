"""The reference of windowed attention with a cast: dtypes, and where its rows are."""

import pytest
import torch

from dsa.cases import cases_of
from tests.reference.common import assert_same_bits

CASE, _ = cases_of("window_attention_cast")
SMALL = {"sequences": ((3, 3), (4, 4)), "heads": 4, "d": 256, "window": 3, "top_k": 5}


@pytest.mark.parametrize("use_ue8m0", [True, False])
@pytest.mark.parametrize("entries", [9, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_are_right(dtype, entries, use_ue8m0):
    CASE.verify(**SMALL, entries=entries, dtype=dtype, use_ue8m0=use_ue8m0)


def test_one_group_of_all_heads_is_the_other_order():
    given = CASE.arguments(**SMALL, entries=9)
    tokens, heads, d = given["q"].shape
    (whole, scales), parts = (CASE.run(given | {"groups": groups}) for groups in (1, heads))
    whole, scales = whole.view(tokens, heads, d).transpose(0, 1), scales.view(tokens, heads, -1).transpose(0, 1)
    assert_same_bits((whole, scales), (parts[0].view(heads, tokens, d), parts[1].view(heads, tokens, -1)))
