"""Results of peers that count as equal to ours, and results that do not."""

from functools import partial

import pytest
import torch

import dsa
from dsa_bench.harness import case as cases
from dsa_bench.harness.agreement import agree, agree_attention, agree_selected, as_reference

torch.manual_seed(0)
OUT, LSE, MOST = torch.randn(100, 6, 8), torch.randn(100, 6) + 7, torch.randn(100, 6)
X = torch.randn(100, 512, dtype=torch.bfloat16)
Q, SCALE = CAST = dsa.per_token_cast_to_fp8(X, True)
GRADIENTS = DQ, DKV, DSINK = torch.randn(8, 4, 64), torch.randn(30, 1, 64), torch.randn(4)
SCORES = torch.randn(3, 400).relu()
ORDER = SCORES.argsort(1, descending=True)
SELECTED = ORDER[:, :100].int()
selected = partial(agree_selected, keys=400, scores=SCORES)
gradients = cases.load("sparse_mla_attention")._agree


def pad(x, *sizes):
    return torch.nn.functional.pad(x, sizes)


@pytest.mark.parametrize(
    ("compare", "theirs", "ours"),
    [
        (agree, OUT + 1e-3 * torch.randn_like(OUT), OUT),
        (agree, (torch.cat((OUT, OUT), 1), "lse"), (OUT, "other")),  # padding at the end; strings are ignored
        (agree, {"out": OUT, "lse": LSE, "none": None}, (OUT, LSE)),
        (agree, (OUT,), (OUT, LSE)),
        # Half the values with twice the scales. Scales that are not powers of two.
        (agree, ((Q.float() / 2).to(Q.dtype), SCALE * 2), CAST),
        (agree, dsa.per_token_cast_to_fp8(X, False), CAST),
        # LSEs with base e, with base 2, and with padding. An LSE of another shape or a missing LSE is not compared.
        (agree_attention, [OUT, MOST, LSE], (OUT, MOST, LSE)),
        (agree_attention, [OUT, LSE / torch.tensor(2.0).log()], (OUT, MOST, LSE)),
        (agree_attention, [pad(OUT, 0, 0, 0, 2), pad(LSE, 0, 2)], (OUT, MOST, LSE)),
        (agree_attention, [OUT, LSE.T], (OUT, MOST, LSE)),
        (agree_attention, OUT, (OUT, MOST, LSE)),
        (gradients, {"dq": DQ, "dkv": DKV[:, 0], "d_sink": DSINK}, GRADIENTS),
        # up to 2% of the selected keys may be wrong
        (selected, {0: SELECTED.flip(1)}, SELECTED),
        (selected, torch.cat((SELECTED[:, :99], ORDER[:, 100:101].int()), 1), SELECTED),
    ],
)
def test_results_agree_up_to_rounding_padding_and_order(compare, theirs, ours):
    compare(theirs, ours)


@pytest.mark.parametrize(
    ("compare", "theirs", "ours", "message"),
    [
        *((agree, x, OUT, "differs by") for x in (OUT.roll(1, 2), OUT * 1.1, torch.where(OUT > 2, torch.nan, OUT))),
        (agree, OUT[:, :, :4], OUT, r"differs: shape \[100, 6, 4\], where ours is \[100, 6, 8\]"),
        *((agree, (OUT, wrong), (OUT, LSE), "differs") for wrong in (torch.zeros_like(LSE), LSE.T)),
        *((agree, nothing, OUT, "differs: no tensor to compare") for nothing in (None, ())),
        (agree, (Q, torch.ones_like(SCALE)), CAST, "differs by"),
        (agree, (Q.view(torch.uint8).roll(1, 1).view(Q.dtype), SCALE), CAST, "differs by"),
        (agree, (Q, SCALE * 2), CAST, "differs by"),
        *(
            (agree_attention, [OUT, wrong], (OUT, MOST, LSE), "LSE differs by")
            for wrong in (torch.zeros_like(LSE), MOST, LSE.roll(1, 0) + 2)
        ),
        (agree_attention, [OUT.roll(1, 0), LSE], (OUT, MOST, LSE), "^differs by"),
        (gradients, {0: DQ, 1: DKV[:, 0] * 0, 2: DSINK}, GRADIENTS, "differs by"),
        (gradients, {0: DQ, 1: DKV[:, 0], 2: -DSINK}, GRADIENTS, "differs by"),
        (gradients, {0: DQ.roll(1, 0), 1: DKV[:, 0], 2: DSINK}, GRADIENTS, "differs by"),
        (selected, ORDER[:, 20:120], SELECTED, r"differs: 80.0% of the keys are as high as ours"),
        (selected, SELECTED[:, :1].expand(3, 100), SELECTED, "differs: a key is there twice"),
        (selected, SELECTED - 1000, SELECTED, "differs: not 100 keys of each row"),
        (selected, SELECTED[:, :50], SELECTED, "differs: not 100 keys of each row"),
    ],
)
def test_another_result_differs(compare, theirs, ours, message):
    with pytest.raises(AssertionError, match=message):
        compare(theirs, ours)


def test_the_tuners_check_compares_what_the_reference_computes():
    masked = torch.tensor([1.0, 2.0, -torch.inf])
    as_reference(lambda: masked, 1e-6)(masked)
    seen = as_reference(lambda: masked, 1e-6, lambda expected: expected != -torch.inf)
    seen(torch.tensor([1.0, 2.0, 5.0]))
    with pytest.raises(AssertionError, match="calc_diff"):
        seen(torch.tensor([1.0, 3.0, -torch.inf]))
