"""Tests of the arguments of batches' constructors."""

import pytest
import torch

from dsa_layers.batch.decode_batch import DecodeBatch, DecodeInputs
from dsa_layers.batch.sequence_batch import SequenceBatch

TABLE = torch.tensor([[4, 1, 7], [3, 8, -1]], dtype=torch.int32)
LENS = torch.tensor([300, 40], dtype=torch.int32)


def sequences(**changed):
    given = {"query_lens": (2, 3), "key_lens": (190, 3), "device": "cpu", "block_table": TABLE, "page_size": 64}
    return SequenceBatch(**given | changed)


def paged(pages=((1,),), key_lens=(2,), **options):
    return SequenceBatch.paged([1], key_lens, pages, 4, **options)


def decoding(**changed):
    return DecodeBatch(**{"block_table": TABLE, "page_size": 64, "key_lens_tensor": LENS, "max_key_len": 192} | changed)


SIZES = "block_table: shape must be [{}, max_pages], got {} (sizes as of {})"
KEY_LENS = "key_lens[1]: must be between query_lens[1]=3 and the 192 tokens of its pages, got 2"
WRONG = [
    (sequences, {"query_lens": 5}, "query_lens: must be a list of integers, got 5"),
    (sequences, {"query_lens": (2, 0)}, "query_lens: every sequence needs at least one new token, got [2, 0]"),
    (sequences, {"query_lens": (2,)}, "query_lens, key_lens: must have one entry a sequence, got 1 and 2"),
    (sequences, {"key_lens": torch.tensor([3])}, "key_lens: must be a list of integers, got tensor([3])"),
    (sequences, {"key_lens": (190, 2)}, KEY_LENS),
    (sequences, {"block_table": None, "key_lens": (3, 2)}, "key_lens[1]: must be at least query_lens[1]=3, got 2"),
    (sequences, {"device": "gpu"}, "device: must be a torch.device or its name, got 'gpu'"),
    (sequences, {"device": "meta"}, "block_table: must be on the batch's device meta, got cpu"),
    (sequences, {"block_table": TABLE.long()}, "block_table: dtype must be int32, got int64"),
    (sequences, {"block_table": TABLE[:1]}, SIZES.format(2, [1, 3], "query_lens")),
    (sequences, {"state_slots": (3, 3)}, "state_slots: must be 2 different numbers, one a sequence, got [3, 3]"),
    (paged, {"pages": [[2**40]]}, f"pages: must be numbers of pages, from 0 to {2**31 - 1}, got [({2**40},)]"),
    (paged, {"pages": None}, "pages: must be a list of pages for each sequence, got None"),
    (paged, {"pages": [1]}, "pages[0]: must be a list of integers, got 1"),
    (paged, {"key_lens": [True]}, "key_lens[0]: must be an integer, got True"),
    (paged, {"state_slots": [-1]}, "state_slots: must be 1 different numbers, one a sequence, got [-1]"),
    (decoding, {"block_table": TABLE.to("meta")}, "block_table: must be on the batch's device cpu, got meta"),
    (decoding, {"page_size": 0}, "page_size: must be at least 1, got 0"),
    (decoding, {"key_lens_tensor": LENS[None]}, "key_lens_tensor: shape must be [B], got [1, 2]"),
    (decoding, {"key_lens_tensor": LENS[:1]}, SIZES.format(1, [2, 3], "key_lens_tensor")),
    (decoding, {"max_key_len": 2, "next_n": 3}, "max_key_len: must be at least 3, got 2"),
    (decoding, {"max_key_len": 2**31}, f"max_key_len: must be at most {2**31 - 1}, got {2**31}"),
    (decoding, {"next_n": 0}, "next_n: must be at least 1, got 0"),
    (decoding, {"state_slots": LENS[:1]}, "state_slots: shape must be [2], got [1] (sizes as of key_lens_tensor)"),
]


@pytest.mark.parametrize(("make", "changed", "message"), WRONG)
def test_wrong_batches_are_refused(make, changed, message):
    with pytest.raises((TypeError, ValueError)) as error:
        make(**changed)
    assert str(error.value) == message


def test_lists_and_a_devices_name_make_the_same_batch_as_paged():
    got = SequenceBatch([2, 3], [190, 3], "cpu", TABLE, 64, [5, 6])
    same = SequenceBatch.paged([2, 3], [190, 3], [[4, 1, 7], [3, 8]], 64, state_slots=[5, 6])
    for name in ("query_lens", "key_lens", "device", "page_size", "state_slots"):
        assert getattr(got, name) == getattr(same, name)
    assert torch.equal(got.slots, same.slots) and torch.equal(got.positions, same.positions)


def test_inputs_of_a_step_make_the_batch_that_the_constructor_makes():
    """All batches of one DecodeInputs share the tensors that depend only on its `count` and `next_n`."""
    inputs = DecodeInputs(2, 3, 64, torch.device("meta"), 2)
    got, again = inputs.batch(), inputs.batch()
    made = DecodeBatch(inputs.block_table, 64, inputs.key_lens, 192, inputs.state_slots, 2)
    assert all(vars(got)[name] is value or vars(got)[name] == value for name, value in vars(made).items())
    for name in ("sequences", "cu_query_lens", "last_tokens"):
        own, others = getattr(got, name), getattr(made, name)
        assert own is getattr(again, name) and own.dtype == others.dtype and own.shape == others.shape
    assert got.group_rows(2, 4) is again.group_rows(2, 4) and got.entries(4) is not again.entries(4)
