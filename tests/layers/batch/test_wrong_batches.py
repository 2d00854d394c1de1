"""Batches refuse wrong arguments. The message names the argument and what it got."""

import re

import pytest
import torch

from dsa_layers.batch.decode_batch import DecodeBatch, DecodeInputs
from dsa_layers.batch.sequence_batch import SequenceBatch

CPU = torch.device("cpu")
TABLE = torch.tensor([[4, 1, 7], [3, 8, -1]], dtype=torch.int32)
LENS = torch.tensor([300, 40], dtype=torch.int32)
SEQUENCES = {"query_lens": (2, 3), "key_lens": (190, 3), "device": CPU, "block_table": TABLE, "page_size": 64}
DECODING = {"block_table": TABLE, "page_size": 64, "key_lens_tensor": LENS, "max_key_len": 192}


def refused(kind, fields, **changed):
    with pytest.raises((TypeError, ValueError)) as error:
        kind(**fields | changed)
    return str(error.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query_lens": 5}, "query_lens: must be a list of integers, got 5"),
        ({"query_lens": (2, 0)}, "query_lens: every sequence needs at least one new token, got [2, 0]"),
        ({"query_lens": (2,)}, "query_lens, key_lens: must have one entry a sequence, got 1 and 2"),
        ({"key_lens": torch.tensor([190, 3])}, "key_lens: must be a list of integers, got tensor([190, 3])"),
        ({"key_lens": (190, 2)}, "key_lens[1]: must be between query_lens[1]=3 and the 192 tokens of its pages, got 2"),
        ({"block_table": None, "key_lens": (190, 2)}, "key_lens[1]: must be at least query_lens[1]=3, got 2"),
        ({"device": "gpu"}, "device: must be a torch.device or its name, got 'gpu'"),
        ({"device": "meta"}, "block_table: must be on the batch's device meta, got cpu"),
        ({"block_table": TABLE.long()}, "block_table: dtype must be int32, got int64"),
        ({"block_table": TABLE[:1]}, "block_table: shape must be [2, max_pages], got [1, 3] (sizes as of query_lens)"),
        ({"state_slots": (3, 3)}, "state_slots: must be 2 different numbers, one a sequence, got [3, 3]"),
    ],
)
def test_wrong_sequences_are_refused(changed, message):
    assert refused(SequenceBatch, SEQUENCES, **changed) == message


def test_lists_and_a_devices_name_make_the_same_batch_as_paged():
    got = SequenceBatch([2, 3], [190, 3], "cpu", TABLE, 64, [5, 6])
    same = SequenceBatch.paged([2, 3], [190, 3], [[4, 1, 7], [3, 8]], 64, state_slots=[5, 6])
    for name in ("query_lens", "key_lens", "device", "page_size", "state_slots"):
        assert getattr(got, name) == getattr(same, name)
    assert torch.equal(got.slots, same.slots) and torch.equal(got.positions, same.positions)
    assert SequenceBatch((1,), (9,), CPU).key_lens == (9,)  # the keys are not in pages


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], [2], [[2**40]], 4), f"pages: must be numbers of pages, from 0 to {2**31 - 1}, got [({2**40},)]"),
        (([1], [2], None, 4), "pages: must be a list of pages for each sequence, got None"),
        (([1], [2], [1], 4), "pages[0]: must be a list of integers, got 1"),
        (([1], [2], [[1.5]], 4), "pages[0][0]: must be an integer, got 1.5"),
        (([1], [5], [[1]], 4), "key_lens[0]: must be between query_lens[0]=1 and the 4 tokens of its pages, got 5"),
        (([1], [True], [[1]], 4), "key_lens[0]: must be an integer, got True"),
        (([1], [2], [[1]], 4, "cpu", [-1]), "state_slots: must be 1 different numbers, one a sequence, got [-1]"),
        (([1], [2], [[1]], 4, "cpu", [None]), "state_slots[0]: must be an integer, got None"),
    ],
)
def test_wrong_pages_are_refused(arguments, message):
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        SequenceBatch.paged(*arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_table": None}, "block_table: must be a torch.Tensor, got NoneType"),
        ({"block_table": TABLE.to("meta")}, "block_table: must be on the batch's device cpu, got meta"),
        ({"page_size": 0}, "page_size: must be at least 1, got 0"),
        ({"key_lens_tensor": LENS[None]}, "key_lens_tensor: shape must be [B], got [1, 2]"),
        (
            {"key_lens_tensor": LENS[:1]},
            "block_table: shape must be [1, max_pages], got [2, 3] (sizes as of key_lens_tensor)",
        ),
        ({"max_key_len": 2, "next_n": 3}, "max_key_len: must be at least 3, got 2"),
        ({"max_key_len": 2**31}, f"max_key_len: must be at most {2**31 - 1}, got {2**31}"),
        ({"max_key_len": LENS}, "max_key_len: must be an integer, got tensor([300, 40], dtype=torch.int32)"),
        ({"next_n": 0}, "next_n: must be at least 1, got 0"),
        ({"state_slots": LENS[:1]}, "state_slots: shape must be [2], got [1] (sizes as of key_lens_tensor)"),
    ],
)
def test_wrong_decoding_steps_are_refused(changed, message):
    assert refused(DecodeBatch, DECODING, **changed) == message


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_inputs_of_a_step_make_the_batch_that_the_constructor_makes(device):
    """All batches share the tensors that depend on the size only."""
    inputs = DecodeInputs(2, 3, 64, torch.device(device), 2)
    got, again = inputs.batch(), inputs.batch()
    made = DecodeBatch(inputs.block_table, 64, inputs.key_lens, 192, inputs.state_slots, 2)
    assert all(vars(got)[name] is value or vars(got)[name] == value for name, value in vars(made).items())
    for name in ("sequences", "cu_query_lens", "last_tokens"):
        own, others = getattr(got, name), getattr(made, name)
        assert own is getattr(again, name) and own.dtype == others.dtype and own.shape == others.shape
    assert got.group_rows(2, 4) is again.group_rows(2, 4) and got.entries(4) is not again.entries(4)
