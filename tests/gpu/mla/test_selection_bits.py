"""selection_bits (bit masks of selected keys) on the GPU: index lists of many lengths, with any contents."""

import pytest
import torch

from tests.gpu.attention import case_of, checked

CASE = case_of("selection_bits")


@pytest.mark.parametrize("max_keys", [0, 1, 127, 128, 129, 5000, 300000])
@pytest.mark.parametrize("k", [0, 1, 16, 33, 1024, 2048])
@pytest.mark.parametrize(("tokens", "starts"), [(40, True), (40, False), (0, True)])
def test_bits_are_those_of_the_lists(tokens, starts, k, max_keys):
    checked(CASE, CASE.arguments("cuda", tokens=tokens, top_k=k, max_keys=max_keys, starts=starts))


def test_numbers_near_the_ends_of_int32_set_the_right_bits():
    values = torch.tensor([-(2**31), -(2**31) + 1, -1, 0, 1, 127, 128, 2**31 - 2, 2**31 - 1], device="cuda").int()
    indices, starts = (values[torch.randint(len(values), shape)] for shape in ((200, 70), (200,)))
    checked(CASE, {"indices": indices, "starts": starts, "max_keys": 1000})
