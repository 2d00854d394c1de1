"""What conftest.py promises: a test's numbers are its own, whatever ran before it."""

import random
import zlib

import pytest
import torch


@pytest.fixture(scope="module")
def shared():
    return torch.rand(4), random.random()


def drawn_from(seed):
    own = random.Random(seed)
    return torch.rand(4, generator=torch.Generator().manual_seed(seed)), own.random()


@pytest.mark.parametrize("before", [0, 3])
def test_numbers_are_a_tests_own(before, shared, request):
    """Of the second as of the first, which alone has made what they share."""
    numbers, number = drawn_from(zlib.crc32(request.node.nodeid.encode()))
    assert torch.equal(torch.rand(4), numbers) and random.random() == number
    numbers, number = drawn_from(0)
    assert torch.equal(shared[0], numbers) and shared[1] == number
    torch.rand(before)
