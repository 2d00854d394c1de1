"""flash_mla_sparse_fwd on the GPU with at most 16 heads. The kernels compute 4 or 8 adjacent queries together if these
have many keys in common. The tests check which groups selection_union_sm90.py chooses, the unions of keys that it
lists, and the results."""

import pytest
import torch

from dsa.cases.attention import PREFILL_TOLERANCES, some_rows
from dsa.kernels.mla.limits import MEMBER_SHIFT, MOST_UNION
from dsa.kernels.mla.selection_union_sm90 import compile_selection_union
from dsa.ops.mla import _shared_keys as shared
from dsa.ops.mla import flash_mla_sparse_fwd as bridge
from dsa.runtime.recorded_calls import KnownCalls
from dsa.testing import assert_close
from tests.gpu.attention import INF, KINDS, NAN, case_of, checked, int32, maker, replayed
from tests.gpu.mla.selected_keys import PER_QUERY, Op, SelectedKeys, with_nan_rows
from tests.gpu.op_checks import assert_rows_stand_alone, assert_runs_have_the_same_bits, assert_same_bits

CASE = case_of("flash_mla_sparse_fwd")
by_size = pytest.mark.parametrize("size", [4, 8])


@pytest.fixture(autouse=True)
def all_calls_may_share(monkeypatch):
    """Calls recorded in other tests can use other kernels, so the stores of recorded calls are empty."""
    monkeypatch.setattr(shared, "may_share", lambda *_: True)
    for op in (bridge._sparse_mla_prefill, bridge._sparse_mla_prefill.into):
        monkeypatch.setattr(op, "known", KnownCalls())


def distinct(queries, n, k):
    return some_rows(maker(), queries, n, k)


def overlapping(queries, keys, k, pool):
    """Return int32 [queries, 1, k] with k different keys per query. Each 16 adjacent queries select from the same
    `pool` random keys."""
    pools = distinct(-(-queries // 16), keys, pool).repeat_interleave(16, 0)[:queries]
    return pools.gather(1, distinct(queries, pool, k).long())[:, None].contiguous()


def inputs(queries=61, heads=16, keys=3000, k=700, pool=None, seed=0, **options):
    sizes = {"tokens": queries, "heads": heads, "keys": keys, "top_k": 1, "sink": False, **options}
    pool = min(keys, k * 10 // 7) if pool is None else pool
    return CASE.arguments("cuda", seed, **sizes) | {"indices": overlapping(queries, keys, k, pool)}


@pytest.fixture(params=[8, 16])
def op(request):
    return Op(
        CASE, lambda *sizes, **options: with_nan_rows(inputs(*sizes, **options)), request.param, {"invariant": True}
    )


class TestSelectedKeys(SelectedKeys):
    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("place", [0, 300, 575])
    def test_nan_reaches_the_query_that_selects_it_alone(self, op, place, bad):
        """If the output of a query is not finite, another kernel computes the group's queries one by one. This can
        change the rounding of the other queries' results."""
        given = op.inputs(65, 3000, 500, pool=550)
        given["indices"] %= 5998
        clean, affected = op.run(given), torch.arange(65, device="cuda") % 62 == 2
        given["indices"][affected, 0, 123], given["kv"][5998, 0, place] = 5998, bad
        found = op.run(given)
        assert abs(bad) == INF or all(x[affected].isnan().all() for x in found)
        for got, expected in zip(found, clean, strict=True):
            assert_close("others", got[~affected].float(), expected[~affected].float(), **PREFILL_TOLERANCES[0])


def union(indices, size, s_kv, lengths=None):
    """Run the kernel. -> (keys per group, their numbers, groups computed together, queries computed alone)"""
    s_q, _, k = indices.shape
    groups = -(-s_q // size)
    lists = int32([[[-1] * max(1, min(size * k * MOST_UNION[0] // MOST_UNION[1], s_kv))]] * groups)
    found, of_groups, of_queries, queued = (int32([-7] * n) for n in (groups, groups, s_q, 2))
    queued.zero_()
    counts = int32([0]) if lengths is None else lengths
    compile_selection_union(size)(
        *(indices, counts, int(lengths is not None), s_kv, lists, found, queued, of_groups, of_queries)
    )
    together, alone = queued.tolist()
    return lists, found, of_groups[:together].tolist(), of_queries[:alone].tolist()


def check_union(indices, size, s_kv, lengths=None):
    """-> the groups whose queries are computed together, in order"""
    lists, found, groups, alone = union(indices, size, s_kv, lengths)
    s_q, _, k = indices.shape
    rows = indices[:, 0].tolist()
    counts = [k] * s_q if lengths is None else lengths.clamp(0, k).tolist()
    members = [range(first, min(first + size, s_q)) for first in range(0, s_q, size)]
    assert sorted([*alone, *(t for g in groups for t in members[g])]) == list(range(s_q))
    for g, queries in enumerate(members):
        selections = [[key for key in rows[t][: counts[t]] if 0 <= key < s_kv] for t in queries]
        total, repeats = sum(map(len, selections)), any(len({*keys}) < len(keys) for keys in selections)
        expected = {key: 0 for keys in selections for key in keys}
        for m, keys in enumerate(selections):
            for key in keys:
                expected[key] |= 1 << m
        if g in groups:
            assert not repeats and len(expected) * MOST_UNION[1] <= total * MOST_UNION[0]
            entries = lists[g, 0, : found[g]].tolist()
            got = {entry & (2**MEMBER_SHIFT - 1): (entry & 2**32 - 1) >> MEMBER_SHIFT for entry in entries}
            assert len(entries) == len(expected) and got == expected
        elif not repeats:
            # The kernel first estimates the union's size from a sample, so it can reject unions slightly below the
            # limit.
            assert len(expected) * MOST_UNION[1] > 0.8 * total * MOST_UNION[0] or total < 2000
    return sorted(groups)


@by_size
@pytest.mark.parametrize("s_kv", [3000, 70000, 140000, 300000])
@pytest.mark.parametrize("k", [1, 31, 512, 700, 2048])
def test_lists_are_unions_of_selections(k, s_kv, size):
    """If kv has many keys, the kernel needs several rounds (ranges of keys). The last group has fewer queries."""
    indices = overlapping(37, s_kv, k, k + k // 4)
    assert check_union(indices, size, s_kv) or k == 1
    changed = torch.where(torch.rand(indices.shape, device="cuda") < 0.1, int32(-1), indices)
    changed[5, 0, : k // 2], changed[6] = s_kv, 2**31 - 1
    check_union(changed, size, s_kv)
    lengths = torch.randint(-5, k + 100, (37,), dtype=torch.int32, device="cuda")
    lengths[8:16] = 0
    # The queries of groups without keys are computed together, because an empty union is below the limit.
    assert 8 // size in check_union(changed, size, s_kv, lengths)


@by_size
def test_keys_of_every_round_are_found(size):
    """kv has MOST_KEYS keys, the largest number for which queries are grouped."""
    s_kv = shared.MOST_KEYS
    indices = overlapping(40, s_kv - 1, 2048, 2500)
    indices[:, 0, 100] = s_kv - 1
    assert check_union(indices, size, s_kv) == list(range(40 // size))
    indices[8:] = distinct(32, s_kv, 2048)[:, None]
    assert check_union(indices, size, s_kv) == list(range(8 // size))


@by_size
def test_groups_share_keys_and_name_none_twice(size):
    same, apart = overlapping(16, 60000, 2048, 2048), distinct(16, 60000, 2048)[:, None]
    twice, groups = same.clone(), list(range(16 // size))
    twice[size + 1, 0, 17] = twice[size + 1, 0, 1999]
    assert check_union(same, size, 60000) == groups and check_union(apart, size, 60000) == []
    assert check_union(twice, size, 60000) == [g for g in groups if g != 1]
    assert check_union(torch.cat((apart, same)), size, 60000) == [g + 16 // size for g in groups]


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 7, 8, 9, 12, 16])
def test_heads_are_right(heads, d, dtype, record_error):
    checked(CASE, inputs(heads=heads, d=d, dtype=dtype, sink=True), record_error)


@pytest.mark.parametrize(
    ("queries", "k"), [*((t, 200) for t in (1, 3, 4, 5, 8, 9, 63, 1061)), *((61, k) for k in (1, 2, 63, 64, 65, 2048))]
)
def test_queries_and_keys_of_any_number_are_right(op, queries, k, record_error):
    op.checked(op.inputs(queries, 3000, k, pool=min(3000, k + 40)), record_error)


@pytest.mark.parametrize("pool", [700, 800, 1200, 3000])
def test_queries_with_more_and_with_less_in_common_are_right(op, pool, record_error):
    """Two adjacent queries have about the fraction 700 / `pool` of their keys in common."""
    op.checked(op.inputs(61, 3000, 700, pool=pool), record_error)
    given = op.inputs(200, 3000, 700)
    given["indices"][40:77] = 2 * distinct(37, 3000, 700)[:, None]
    given["indices"][120:] = 2 * overlapping(80, 3000, 700, pool)
    op.checked(given, record_error)


def test_selections_without_a_key_in_common_are_right(op, record_error):
    given, query = op.inputs(64, 3000, 200, pool=200), torch.arange(64, device="cuda")[:, None, None]
    op.checked(given | {"indices": given["indices"].where(query % 8 == 3, -1)}, record_error)
    op.checked(given | {"indices": (80 * query + torch.arange(0, 80, 2, device="cuda")).int()}, record_error)


def test_a_result_follows_from_its_group(op):
    given = op.inputs(600, 3000, 700)
    assert_runs_have_the_same_bits(op.run, given)
    assert_rows_stand_alone(op.run, given, PER_QUERY, [slice(64, 128), slice(592, 600), slice(0, 8)])


def test_a_batch_invariant_result_does_not_depend_on_the_group(op, record_error):
    """Without enable_batch_invariant the bits depend on the query's position in the call and on the selections of other
    queries."""
    given, later = op.inputs(600, 3000, 700), slice(3, None)
    invariant, others = given | {"enable_batch_invariant": True}, given["indices"].clone()
    others[1::2] = 2 * distinct(300, 3000, 700)[:, None]
    alone = assert_rows_stand_alone(op.run, invariant, PER_QUERY, [later])
    assert_same_bits(
        [x[::2] for x in op.checked(invariant | {"indices": others}, record_error)], [x[::2] for x in alone]
    )
    together, shifted = op.run(given), op.run(given | {name: given[name][later] for name in PER_QUERY[:2]})
    assert not torch.equal(together[1], alone[1]) and not torch.equal(shifted[1], together[1][later])


def test_a_graph_takes_new_selections(record_error):
    given = inputs(300, k=500)
    renewals = (inputs(300, k=500, pool=pool, seed=pool) for pool in (500, 700, 3000, 600))
    for found in replayed(lambda: CASE.run(given), given, renewals):
        assert_same_bits(found, checked(CASE, given, record_error))
