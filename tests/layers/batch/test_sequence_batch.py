"""Packed batches, their windows and their entries, compared with values computed by hand."""

import pytest
import torch

from dsa_layers.batch import packing
from dsa_layers.batch.sequence_batch import Chunk, SequenceBatch, prefill_batch


def test_packed_tensors_are_what_is_computed_by_hand():
    batch = SequenceBatch.paged([2, 1], [5, 3], [[7, 2], [4]], page_size=4)
    assert batch.positions.tolist() == [3, 4, 2]
    assert batch.block_table.tolist() == [[7, 2], [4, -1]] and batch.block_table.dtype == torch.int32
    assert batch.slots.tolist() == [31, 8, 18]
    assert batch.key_slots.tolist() == [28, 29, 30, 31, 8, 16, 17, 18]
    assert batch.key_starts.tolist() == [0, 0, 5] and batch.visible_keys.tolist() == [4, 5, 3]
    assert batch.last_tokens.tolist() == [1, 2] and batch.key_lens_tensor.tolist() == [5, 3]
    assert batch.max_key_len == 5 and not batch.is_decode
    assert SequenceBatch.paged([1, 1], [5, 3], [[7, 2], [4]], 4).is_decode


def test_a_sequence_batch_cannot_be_made_while_a_graph_is_captured(monkeypatch):
    """A SequenceBatch has its lengths on the host, so replays of the graph would use the lengths of the capture."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured as a CUDA graph"):
        SequenceBatch.paged([1], [2], [[1]], 4, "cuda")


def test_selected_positions_become_rows_and_slots():
    indices = torch.tensor([[0, 3, -1], [4, 0, -1], [2, -1, -1]], dtype=torch.int32)
    starts = torch.tensor([0, 0, 5], dtype=torch.int32)
    assert packing.packed_rows(indices, starts, 2).tolist() == [[0, 3, -1], [4, 0, -1], [7, -1, -1]]
    got = SequenceBatch.paged([2, 1], [5, 3], [[7, 2], [4]], page_size=4).slots_of(indices)
    assert got.tolist() == [[28, 31, -1], [8, 28, -1], [18, -1, -1]] and got.dtype == torch.int32


def test_windows_are_what_is_computed_by_hand():
    """Windows and rings have 3 tokens. A ring keeps the last three of the second batch's five new tokens."""
    batch = SequenceBatch.paged([2, 1], [5, 2], [[7, 2], [4]], page_size=4, state_slots=[6, 1])
    windows = batch.windows(3, 3)
    assert windows.slots.tolist() == [18, 19, 4]  # positions 3, 4 and 1
    assert windows.earlier_lens == (2, 1)
    assert windows.earlier_slots.tolist() == [19, 20, 3]  # positions 1 and 2 of the first sequence, 0 of the second
    assert windows.order.tolist() == [0, 1, 3, 4, 2, 5] and windows.cu_keys.tolist() == [0, 4, 6]
    assert not windows.in_order
    assert windows is batch.windows(3, 3) and windows is not batch.windows(4, 4)
    windows = SequenceBatch.paged([5, 1], [7, 1], [[7, 2], [4]], page_size=4, state_slots=[6, 1]).windows(3, 3)
    assert windows.slots.tolist() == [-1, -1, 19, 20, 18, 3]
    assert windows.earlier_lens == (2, 0) and windows.earlier_slots.tolist() == [18, 19]


def test_windows_need_state_slots():
    windows = SequenceBatch.paged([1], [5], [[7, 2]], page_size=4).windows(3, 3)
    assert windows.in_order
    with pytest.raises(ValueError, match="state_slots: must be one a sequence for this model's cache, got None"):
        windows.earlier_slots  # noqa: B018


def test_entries_are_what_is_computed_by_hand():
    """An entry has 2 tokens. Position 3 of the first sequence and position 1 of the second complete entries."""
    batch = SequenceBatch.paged([2, 1], [5, 2], [[7, 2], [4]], page_size=4)
    entries = batch.entries(2)
    assert entries.page_size == 2 and entries.key_lens == (2, 1) and entries.key_lens_tensor.tolist() == [2, 1]
    assert entries.visible_keys.tolist() == [2, 2, 1] and entries.key_starts.tolist() == [0, 0, 2]
    assert entries.rows.tolist() == [[0, 1], [0, 1], [2, 3]] and entries.selected_counts(2).tolist() == [2, 2, 1]
    assert entries.positions.tolist() == [2, 3, 0] and entries.slots.tolist() == [15, -1, 8]
    assert entries.key_slots.tolist() == [14, 15, 8]
    got = entries.slots_of(torch.tensor([[1, -1], [0, 1], [0, -1]], dtype=torch.int32))
    assert got.tolist() == [[15, -1], [14, 15], [8, -1]] and got.dtype == torch.int32


def test_a_batch_has_a_chunk_of_each_prompt():
    batch = prefill_batch([Chunk(2, 3, [7, 2], 6), Chunk(4, 0, range(4, 5), 1)], page_size=4, device="cpu")
    assert (batch.query_lens, batch.key_lens) == ((2, 4), (5, 4)) and not batch.is_decode
    assert batch.positions.tolist() == [3, 4, 0, 1, 2, 3] and batch.earlier_lens_tensor.tolist() == [3, 0]
    assert batch.slots.tolist() == [31, 8, 16, 17, 18, 19] and batch.block_table.tolist() == [[7, 2], [4, -1]]
    assert batch.state_slots_tensor.tolist() == [6, 1]


def test_counts_are_the_visible_keys_up_to_the_columns():
    batch = SequenceBatch.paged([3, 2], [7, 9], [[0, 1], [2, 3, 4]], 4)
    assert batch.least_visible == 5
    assert batch.selected_counts(6).tolist() == [5, 6, 6, 6, 6] and batch.selected_counts(6) is batch.selected_counts(6)
    assert batch.selected_counts(5) is None and batch.selected_counts(9).tolist() == [5, 6, 7, 8, 9]
    entries = batch.entries(4)
    assert entries.selected_counts(2).tolist() == [1, 1, 1, 2, 2] and entries.selected_counts(1) is None


def test_positions_beyond_a_million_have_the_right_slots():
    pages = [2**25 - 1, *range(2**14, 2**15 + 1)]
    pages[-1] = 2**25 - 2
    batch = SequenceBatch.paged([3], [2**20 + 1], [pages], page_size=64, state_slots=[5])
    assert len(pages) == 2**14 + 2 and batch.positions.tolist() == [2**20 - 2, 2**20 - 1, 2**20]
    place = pages[2**14] * 64
    assert batch.slots.tolist() == [pages[2**14 - 1] * 64 + 62, pages[2**14 - 1] * 64 + 63, place]
    assert batch.key_slots[:3].tolist() == [2**31 - 64, 2**31 - 63, 2**31 - 62] and len(batch.key_slots) == 2**20 + 1
    first = torch.tensor([[0, 63, -1]], dtype=torch.int32).expand(3, -1)
    assert batch.slots_of(first)[0].tolist() == [2**31 - 64, 2**31 - 1, -1]
    assert batch.visible_keys.tolist() == [2**20 - 1, 2**20, 2**20 + 1]
    entries = batch.entries(4)
    assert entries.max_key_len == 2**18 and entries.visible_keys.tolist() == [2**18 - 1, 2**18, 2**18]
    assert entries.key_slots[[0, -1]].tolist() == [(2**25 - 1) * 16, pages[2**14 - 1] * 16 + 15]
    assert entries.slots.tolist() == [-1, pages[2**14 - 1] * 16 + 15, -1]
    assert entries.rows.shape == (3, 2**18) and entries.rows.untyped_storage().nbytes() == 4 * 2**18
    windows = batch.windows(128, 131)
    assert windows.slots.tolist() == [5 * 131 + p % 131 for p in batch.positions.tolist()]
