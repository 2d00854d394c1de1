"""The bridge of scores over pages and selection in one, on the CPU, against Python's sort, and what it launches."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dsa
from dsa.kernels.indexer import paged_select_plan as plan
from dsa.reference import write_indexer_cache
from dsa.reference.indexer import paged_indexer_select as reference

SMS = 132  # num_sms("cpu")


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def inputs(next_n=2, heads=8, dim=32, page_size=32, pages=13, batch=3, max_pages=4):
    """q, cache, weights, lengths and block table of sequences of up to 128 keys."""
    q = torch.randn(batch, next_n, heads, dim).to(torch.float8_e4m3fn)
    cache = torch.full((pages, page_size, 1, dim + 4), 0xFF, dtype=torch.uint8)
    keys = torch.randn(pages * page_size, dim).to(torch.float8_e4m3fn)
    write_indexer_cache(keys, torch.rand(len(keys)), cache, torch.arange(len(keys)))
    table = torch.randint(pages, (batch, max_pages)).int()
    lengths = i32([70, 0, 128] * batch)[:batch]
    return q, cache, torch.randn(batch * next_n, heads), lengths, table


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    keys=st.lists(st.integers(-2, 2), min_size=1, max_size=70),
    lengths=st.lists(st.integers(-3, 80), min_size=2, max_size=2),
    k=st.integers(1, 80),
)
def test_any_scores_are_sorted_as_python_sorts_them(keys, lengths, k):
    """Heads of one channel that counts, so that scores are small integers, many of them equal."""
    of_keys = torch.zeros(len(keys), 32)
    of_keys[:, 0] = torch.tensor(keys)
    q, weights = torch.zeros(1, 2, 8, 32), torch.ones(2, 8)
    q[..., :3, 0], q[..., 3, 0], weights[:, 3] = 1.0, -1.0, -2.0
    cache = torch.zeros(5, 16, 1, 36, dtype=torch.uint8)
    slots = i32([2, 0, 4, 1, 3]).repeat_interleave(16) * 16 + torch.arange(80) % 16
    write_indexer_cache(of_keys.to(torch.float8_e4m3fn), torch.ones(len(keys)), cache, slots[: len(keys)])
    arguments = q.to(torch.float8_e4m3fn), cache, weights, i32([lengths]), i32([[2, 0, 4, 1, 3]]), len(keys), k
    got, values = dsa.paged_indexer_select(*arguments, return_values=True)
    scores = [3 * max(x, 0) - 2 * max(-x, 0) for x in keys]
    for row, value, length in zip(got.tolist(), values.tolist(), lengths):
        end = min(max(length, 0), len(keys))
        best = sorted(sorted(range(end), key=lambda s: (-scores[s], s))[:k])
        assert row == best + [-1] * (k - len(best))
        assert value == [scores[s] for s in best] + [-torch.inf] * (k - len(best))
    of_slots = [[int(slots[s]) if s >= 0 else -1 for s in row] for row in got.tolist()]
    assert dsa.paged_indexer_select(*arguments, slots=True).tolist() == of_slots


def test_a_row_of_the_workspace_is_what_the_kernel_takes():
    assert reference.WORKSPACE_WORDS == plan.ROW_WORDS


@pytest.mark.parametrize(
    ("heads", "next_n", "expected"), [(64, 4, True), (64, 3, True), (64, 2, False), (64, 1, False), (32, 4, False)]
)
def test_half_scores_only_where_arithmetic_bounds(heads, next_n, expected, launches):
    arguments = inputs(next_n, heads)
    dsa.paged_indexer_select(*arguments, 100, 40, accumulators=torch.float16)
    dsa.paged_indexer_select(*arguments, 100, 40)
    assert [variant[4] for variant, _ in launches] == [expected, False]


def test_more_sequences_than_a_launch_has_room_for(launches):
    """Launches of about as many each, over the same rows of the workspace."""
    batch = 2 * plan.MAX_SEQUENCES + 3
    q, cache, weights, lengths, table = inputs(batch=batch)
    for workspace in (dsa.paged_indexer_select_workspace(2 * batch, "cpu"), None):
        launches.clear()
        got, values = dsa.paged_indexer_select(
            q, cache, weights, lengths, table, 100, 40, return_values=True, workspace=workspace
        )
        starts = [0, 23, 46]
        assert len(launches) == 3
        first = launches[0][1][5]
        for start, end, (_, arguments) in zip(starts, (*starts[1:], batch), launches):
            flat, _, rows, seen, blocks, words, indices, of_values, *_ = arguments
            queries = slice(2 * start, 2 * end)
            assert torch.equal(flat.view(torch.uint8), q[start:end].reshape(-1, 32).view(torch.uint8))
            assert torch.equal(rows, weights[queries]) and torch.equal(seen, lengths[start:end, None])
            assert torch.equal(blocks, table[start:end])
            assert words.shape == (2 * (end - start), 8192) and words.data_ptr() == first.data_ptr()
            for part, whole in ((indices, got), (of_values, values)):
                assert part.shape == (2 * (end - start), 40)
                assert part.data_ptr() == whole[queries].data_ptr()


def test_keys_decide_how_many_sequences_a_launch_has(launches):
    """All of a launch's scores are in shared memory."""
    arguments = inputs(next_n=1, heads=64, batch=8, max_pages=2**20 // 32)
    dsa.paged_indexer_select(*arguments, 2**20, 40)
    each = plan.sequences_of_launch(2**20, plan.choose_config(64, 1, False).capacity(64, 1, False), SMS)
    assert 1 < each < 8 and len(launches) == -(-8 // each)
    launches.clear()
    dsa.paged_indexer_select(*arguments, 2**16, 40)
    assert len(launches) == 1


def test_more_keys_than_the_kernel_takes(launches):
    most = plan.choose_config(64, 4, False).capacity(256, 4, False) * (SMS - 1)
    q, cache, weights, lengths, _ = inputs(next_n=4, heads=64)
    table = torch.zeros(3, -(-most // 32) + 1, dtype=torch.int32)
    message = f"max_context_len: the kernel takes up to {most} keys of 4 queries a sequence of 64 heads, got {most + 1}"
    with pytest.raises(ValueError, match=message):
        dsa.paged_indexer_select(q, cache, weights, lengths, table, most + 1, 40)
    assert not launches
    dsa.paged_indexer_select(q, cache, weights, lengths, table, most, 40)
    dsa.paged_indexer_select(q, cache, weights, lengths, table[:, :4], 2**31 - 1, 40)
    assert len(launches) == 3 + 1
