"""The arguments of the kernel that fills rows without a sequence: views of the results as int32 words, and the fill
values."""

import math

import pytest
import torch

from dsa.ops.training import _uncovered_rows as op


@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (torch.zeros(5, 3, 64, dtype=torch.bfloat16), (5, 3, 32)),
        (torch.zeros(3, 5, 64, dtype=torch.bfloat16).transpose(0, 1), (5, 3, 32)),
        (torch.zeros(5, 3, 192, dtype=torch.bfloat16)[..., :128], (5, 3, 64)),
        (torch.zeros(5, 64, dtype=torch.bfloat16), (5, 1, 32)),
        (torch.zeros(5, 3), (5, 1, 3)),
        (torch.zeros(3, 5).T, (5, 3, 1)),
        (torch.zeros(1, 5).T, (5, 1, 1)),
    ],
)
def test_words_are_the_tensors_own(x, shape):
    words = op.words(x)
    assert words.shape == shape and words.dtype == torch.int32 and words.stride(-1) == 1
    words[2] = 1
    assert x[2].any() and not x[[0, 1, 3, 4]].any()


def test_words_of_numbers():
    from dsa.kernels.training import uncovered_rows_sm90 as kernels

    assert torch.tensor([0.0, math.inf]).view(torch.int32).tolist() == [kernels.ZERO, kernels.INFINITY]


def test_nothing_is_launched_for_empty_tensors():
    bounds = torch.tensor([0, 3], dtype=torch.int32)
    op.fill_uncovered(bounds, (torch.zeros(0, 2, 64), 0.0), (torch.zeros(2, 0).T, math.inf))
    op.fill_uncovered(bounds, (torch.zeros(3, 0, 64), 0.0))
