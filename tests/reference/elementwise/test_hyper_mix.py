"""The reference of the streams' projection gives the same bits for any strides."""

import pytest
import torch

from dsa.cases import cases_of
from dsa.reference import hyper_mix


@pytest.mark.parametrize("n", [1, 4])
def test_strides_change_no_bit(n):
    """PyTorch sums the products of column-major matrices in another order."""
    given = cases_of("hyper_mix")[0].arguments(n=n, channels=64)
    transposed = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in given.items()}
    assert torch.equal(hyper_mix(**transposed), hyper_mix(**given))
