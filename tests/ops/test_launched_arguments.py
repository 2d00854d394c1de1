"""Ops launch kernels with arguments like those for which the kernels are compiled, also in recorded calls."""

import cutlass
import pytest
import torch

from dsa.cute.fake_tensors import fake
from tests.ops.launched_arguments import Memory, differences, launched


def test_all_ops_give_kernels_what_they_take():
    found = launched()
    assert not found["differences"], "\n".join(found["differences"])
    launches = [launch for calls in found["launches"].values() for call in calls for launch in call]
    assert len(found["recorded"]) > 86 and len(launches) > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 3), None, 1), None),
        ((torch.zeros(2, 3), 1), "2 arguments for 3"),
        ((torch.zeros(2, 3), torch.zeros(1), 1), "argument 1: Tensor for None"),
        ((None, None, 1), "argument 0: None for"),
        ((torch.zeros(3), None, 1), "argument 0: shape [3] for"),
        ((torch.zeros(2, 4), None, 1), "argument 0: shape [2, 4] for"),
        ((torch.zeros(2, 3, dtype=torch.int32), None, 1), "argument 0: torch.int32 for Float32"),
    ],
)
def test_differences_are_seen(arguments, message):
    fakes = fake(cutlass.Float32, (2, 3), (3, 1)), None, cutlass.Int32(1), "stream"
    found = list(differences(arguments, fakes))
    assert (not found) if message is None else (len(found) == 1 and found[0].startswith(message)), found


def test_what_memory_holds_that_is_prepared_counts():
    """Floating-point numbers depend on the CPU. So they all have one description, except zeros and uninitialised
    memory."""

    def described(x):
        return Memory(contents=True).described({"x": x})

    nothing, numbers = torch.full((4,), torch.nan), torch.tensor([0.0, 1.0, 2.0, 3.0])
    assert len({described(x) for x in (nothing, numbers, torch.zeros(4))}) == 3
    assert described(numbers) == described(2 * numbers)
    assert described(torch.tensor([1, 2])) != described(torch.tensor([2, 1]))
    assert Memory().described(nothing) == Memory().described(torch.zeros(4))


def test_the_order_of_named_arguments_does_not_count():
    one, other = torch.zeros(2), torch.zeros(3)
    assert Memory().described({"a": one, "b": other}) == Memory().described({"b": other, "a": one})
