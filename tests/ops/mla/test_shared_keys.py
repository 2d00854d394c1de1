"""The launch of sparse MLA prefill for groups of adjacent queries that share keys, on the CPU."""

import pytest
import torch

import dsa
from dsa.kernels.mla import selection_union_sm90, sparse_mla_union_sm90
from dsa.kernels.mla.limits import GROUP_SIZES, MEMBER_SHIFT, TILE_M
from dsa.ops.mla import _shared_keys as shared


def inputs(s_q, heads, k, s_kv=40, d=576):
    q = torch.zeros(1, 1, d, dtype=torch.bfloat16).expand(s_q, heads, d)
    kv = torch.zeros(1, 1, d, dtype=torch.bfloat16).expand(s_kv, 1, d)
    return q, kv, torch.zeros(1, 1, k, dtype=torch.int32).expand(s_q, 1, k), d**-0.5


def test_every_group_has_a_kernel():
    sizes = set(GROUP_SIZES.values())
    assert sizes == {size for _, (size,) in selection_union_sm90.shipped_variants()}
    assert sizes == {size for _, (_, _, size) in sparse_mla_union_sm90.shipped_variants()}
    assert all(heads * size == TILE_M and size <= 32 - MEMBER_SHIFT for heads, size in GROUP_SIZES.items())


@pytest.mark.parametrize(("heads", "size"), [(1, 8), (8, 8), (9, 4), (16, 4), (17, 0), (128, 0)])
def test_queries_of_a_group(heads, size):
    assert shared.group_size(heads) == size


@pytest.mark.parametrize(
    ("s_q", "heads", "k", "s_kv", "shares"),
    [
        (2048, 16, 2048, 40, True),
        (2048, 8, 2048, 40, True),
        (2047, 16, 2048, 40, False),  # too few indices
        (2048, 17, 2048, 40, False),
        (528, 16, 8192, 40, True),
        (527, 16, 8192, 40, False),  # fewer full groups than SMs
        (1055, 8, 4096, 40, False),
        (2048, 16, 2048, 2**21, True),
        (2048, 8, 2048, 2**21, True),
        (2048, 16, 2048, 2**21 + 1, False),  # building a list would take too many passes over the indices
    ],
)
@pytest.mark.parametrize("into", [False, True])
def test_where_queries_may_share(named_launches, s_q, heads, k, s_kv, shares, into):
    out = torch.empty(s_q, heads, 512, dtype=torch.bfloat16) if into else None
    for invariant in (None, False, True):
        named_launches.clear()
        options = {} if invariant is None else {"enable_batch_invariant": invariant}
        dsa.flash_mla_sparse_fwd(*inputs(s_q, heads, k, s_kv), out=out, **options)
        names = [name for name, *_ in named_launches]
        grouped = ["selection_union", "sparse_mla_union", "sparse_mla_queued"]
        assert names == (grouped if shares and not invariant else ["sparse_mla_swap_ab"])


@pytest.mark.parametrize("size", GROUP_SIZES.values())
def test_keys_that_a_list_can_have(size):
    """An entry of a list has enough bits for every key number. The kernel's table has an entry for every key that it
    samples (one out of SAMPLE)."""
    assert shared.MOST_KEYS <= 2**MEMBER_SHIFT
    table = selection_union_sm90.SelectionUnionSm90(size).range
    assert shared.MOST_KEYS <= table * selection_union_sm90.SAMPLE


def test_what_is_launched(named_launches):
    q, kv, indices, scale = inputs(2050, 12, 2048, 5000)
    lengths = torch.full((2050,), 100, dtype=torch.int32)
    out, max_logits, lse = dsa.flash_mla_sparse_fwd(q, kv, indices, scale, topk_length=lengths)
    (_, of_union, union), (_, of_groups, groups), (_, of_queued, queued) = named_launches
    assert (of_union, of_groups, of_queued) == ((4,), ("bfloat16", 576, 4), ("bfloat16", 576))
    index, counts, has_counts, keys, lists, found, numbers, group_queue, query_queue = union
    assert index.shape == indices.shape and counts.data_ptr() == lengths.data_ptr() and (has_counts, keys) == (1, 5000)
    # A list has room for 7/10 of the indices of four queries, but at most for all 5000 keys of the cache.
    assert lists.shape == (513, 1, 5000) and found.shape == group_queue.shape == (513,)
    assert query_queue.shape == (2050,) and numbers.tolist() == [0, 0]
    assert groups[2] is lists and groups[3] is found and groups[-4:] == (132, numbers, group_queue, query_queue)
    assert queued[2:5] == (index, counts, 1) and queued[-3:] == (132, numbers, query_queue)
    for launch in (groups[6:], queued[7:]):
        assert [x.data_ptr() for x in launch[:2]] == [out.data_ptr(), lse.data_ptr()]
        assert launch[4].data_ptr() == max_logits.data_ptr()
    named_launches.clear()
    dsa.flash_mla_sparse_fwd(*inputs(2050, 12, 2048, 9000))
    assert named_launches[0][2][4].shape == (513, 1, 4 * 2048 * 7 // 10) and named_launches[0][2][2] == 0
