"""Sparse MLA prefill of few heads where neighbouring queries share keys, on the GPU: which queries are computed
together, and their results."""

import pytest
import torch

from dsa.cases.attention import PREFILL, some_rows
from dsa.kernels.mla.limits import MEMBER_SHIFT, MOST_UNION
from dsa.kernels.mla.selection_union_sm90 import compile_selection_union
from dsa.ops.mla import _shared_keys as shared
from dsa.ops.mla import flash_mla_sparse_fwd as bridge
from dsa.runtime.known_calls import KnownCalls
from dsa.testing import assert_close
from tests.gpu.attention import (
    BF16,
    INF,
    KINDS,
    NAN,
    assert_writes_a_part,
    case_of,
    checked,
    int32,
    maker,
    replayed,
    spoiled,
)
from tests.gpu.op_checks import among_nan, assert_runs_have_the_same_bits, assert_same_bits

CASE = case_of("flash_mla_sparse_fwd")
few_heads = pytest.mark.parametrize("heads", [8, 16])


@pytest.fixture(autouse=True)
def all_calls_may_share(monkeypatch):
    """Of any number of queries and indices. No call of another test is remembered here, nor of this one elsewhere."""
    monkeypatch.setattr(shared, "may_share", lambda *_: True)
    for op in (bridge._sparse_mla_prefill, bridge._sparse_mla_prefill.into):
        monkeypatch.setattr(op, "known", KnownCalls())


def distinct(queries, n, k):
    return some_rows(maker(), queries, n, k)


def overlapping(queries, keys, k, pool):
    """Lists of k keys in random order; 16 neighbouring queries draw theirs from one pool of `pool` keys."""
    pools = distinct(-(-queries // 16), keys, pool).repeat_interleave(16, 0)[:queries]
    return pools.gather(1, distinct(queries, pool, k).long())[:, None].contiguous()


def inputs(queries=61, heads=16, keys=3000, k=700, d=576, dtype=BF16, pool=1000, seed=0):
    sizes = {"tokens": queries, "heads": heads, "keys": keys, "top_k": 1, "d": d, "dtype": dtype, "sink": False}
    given = CASE.arguments("cuda", seed, **sizes)
    return given | {"indices": overlapping(queries, keys, k, pool)}


def union(indices, size, s_kv, lengths=None):
    """What the first kernel finds: (lists, their lengths, groups, queries by themselves)."""
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
    """-> the groups that are computed together."""
    lists, found, groups, alone = union(indices, size, s_kv, lengths)
    s_q, _, k = indices.shape
    rows = indices[:, 0].tolist()
    counts = [k] * s_q if lengths is None else lengths.clamp(0, k).tolist()
    members = {g: range(g * size, min((g + 1) * size, s_q)) for g in range(-(-s_q // size))}
    assert len(groups) == len(set(groups)) and len(alone) == len(set(alone))
    assert sorted([*alone, *(t for g in groups for t in members[g])]) == list(range(s_q))
    for g, queries in members.items():
        expected, total, repeats = {}, 0, False
        for m, t in enumerate(queries):
            keys = [key for key in rows[t][: counts[t]] if 0 <= key < s_kv]
            total, repeats = total + len(keys), repeats or len(set(keys)) < len(keys)
            for key in keys:
                expected[key] = expected.get(key, 0) | 1 << m
        if g in groups:
            assert not repeats and len(expected) * MOST_UNION[1] <= total * MOST_UNION[0]
            entries = lists[g, 0, : found[g]].tolist()
            assert len(entries) == len(expected)
            got = {entry & (2**MEMBER_SHIFT - 1): (entry & 2**32 - 1) >> MEMBER_SHIFT for entry in entries}
            assert got == expected
        elif not repeats:
            # Not far above what would do: the sample may have said so.
            assert len(expected) * MOST_UNION[1] > 0.8 * total * MOST_UNION[0] or total < 2000
    return groups


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("s_kv", [3000, 70000, 140000, 300000])
@pytest.mark.parametrize("k", [1, 31, 512, 700, 2048])
def test_lists(k, s_kv, size):
    """Also where keys take several rounds, and the last group has fewer queries."""
    indices = overlapping(37, s_kv, k, k + k // 4)
    assert check_union(indices, size, s_kv) or k == 1
    changed = torch.where(torch.rand(indices.shape, device="cuda") < 0.1, int32(-1), indices)
    changed[5, 0, : k // 2], changed[6] = s_kv, 2**31 - 1
    check_union(changed, size, s_kv)
    lengths = torch.randint(-5, k + 100, (37,), dtype=torch.int32, device="cuda")
    lengths[8:16] = 0
    groups = check_union(changed, size, s_kv, lengths)
    assert 8 // size in groups  # nothing is little enough


@pytest.mark.parametrize("size", [4, 8])
def test_lists_of_as_many_keys_as_there_may_be(size):
    """Over all rounds, up to the last key."""
    s_kv = shared.MOST_KEYS
    indices = overlapping(40, s_kv - 1, 2048, 2500)
    indices[:, 0, 100] = s_kv - 1
    assert sorted(check_union(indices, size, s_kv)) == list(range(40 // size))
    indices[8:] = distinct(32, s_kv, 2048)[:, None]
    assert sorted(check_union(indices, size, s_kv)) == list(range(8 // size))


@pytest.mark.parametrize("size", [4, 8])
def test_which_groups(size):
    same, apart = overlapping(16, 60000, 2048, 2048), distinct(16, 60000, 2048)[:, None]
    twice = same.clone()
    twice[size + 1, 0, 17] = twice[size + 1, 0, 1999]
    whole = 16 // size
    assert sorted(check_union(same, size, 60000)) == list(range(whole))
    assert check_union(apart, size, 60000) == []
    assert sorted(check_union(twice, size, 60000)) == [g for g in range(whole) if g != 1]
    assert sorted(check_union(torch.cat((apart, same)), size, 60000)) == list(range(whole, 2 * whole))


@pytest.mark.parametrize(("d", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("heads", [1, 3, 7, 8, 9, 12, 16])
def test_heads_are_right(heads, d, dtype, record_error):
    sink = torch.randn(heads, device="cuda")
    checked(CASE, inputs(heads=heads, d=d, dtype=dtype) | {"attn_sink": sink}, record_error)


@few_heads
@pytest.mark.parametrize("pool", [700, 800, 1200, 3000])
def test_queries_with_more_and_with_less_in_common_are_right(pool, heads, record_error):
    """All the same, much, little and nearly nothing; and each in a part of the queries."""
    checked(CASE, inputs(heads=heads, pool=pool), record_error)
    given = inputs(200, heads)
    given["indices"][40:77] = distinct(37, 3000, 700)[:, None]
    given["indices"][120:] = overlapping(80, 3000, 700, pool)
    checked(CASE, given, record_error)


@few_heads
@pytest.mark.parametrize(
    ("queries", "k"), [*((t, 200) for t in (1, 3, 4, 5, 8, 9, 63, 1061)), *((61, k) for k in (1, 2, 63, 64, 65, 2048))]
)
def test_queries_and_keys_of_any_number_are_right(queries, k, heads, record_error):
    checked(CASE, inputs(queries, heads, k=k, pool=min(3000, k + 40)), record_error)


@few_heads
def test_selections_without_a_key_in_common_are_right(heads, record_error):
    """Of one query alone that has keys, and of queries that each have others."""
    given = inputs(64, heads, k=200, pool=200)
    alone = torch.arange(64, device="cuda")[:, None, None] % 8 == 3
    checked(CASE, given | {"indices": given["indices"].where(alone, -1)}, record_error)
    checked(CASE, given | {"indices": torch.arange(64 * 40, device="cuda").view(64, 1, 40).int()}, record_error)


@few_heads
def test_indices_that_are_no_keys_are_ignored(heads, record_error):
    given = inputs(90, heads) | {"attn_sink": torch.randn(heads, device="cuda")}
    indices = given["indices"] = spoiled(given["indices"], 3000, 0.3)
    indices[5], indices[8:16], indices[88] = -1, 3000, -1
    out, max_logits, lse = (x[[5, *range(8, 16), 88]] for x in checked(CASE, given, record_error))
    assert not out.any() and max_logits.eq(-INF).all() and lse.eq(INF).all()


@few_heads
def test_keys_after_topk_length_are_not_looked_at(heads, record_error):
    """They are NaN."""
    given = inputs(67, heads, keys=4000)
    lengths = torch.randint(-50, 800, (67,), dtype=torch.int32, device="cuda")
    lengths[:5] = int32([0, 1, 64, 700, 2**31 - 1])
    counted = torch.arange(700, device="cuda") < lengths[:, None, None]
    kv = torch.cat((given["kv"], given["kv"][:1] * NAN))
    change = {"kv": kv, "indices": given["indices"].where(counted, 4000), "topk_length": lengths}
    checked(CASE, given | change, record_error)


@few_heads
def test_a_key_named_twice_counts_twice(heads, record_error):
    given = inputs(40, heads)
    indices = given["indices"]
    indices[6, 0, 3], indices[20, 0, 699], indices[30] = indices[6, 0, 400], indices[20, 0, 0], 7
    checked(CASE, given, record_error)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 300, 575])
@few_heads
def test_nan_reaches_the_queries_that_select_it_alone(heads, place, bad):
    """Not those that are computed together with one that does."""
    given = inputs(65, heads, k=700, pool=750)
    rows = given["indices"] % 2998
    given["indices"] = torch.stack([row.unique()[:500] for row in rows])[:, None].contiguous()
    clean = CASE.run(given)
    given["indices"][2, 0, 123] = given["indices"][64, 0, 1] = 2999
    given["kv"][2999, 0, place] = bad
    found, others = CASE.run(given), torch.ones(65, dtype=torch.bool, device="cuda")
    others[[2, 64]] = False
    assert bad in (INF, -INF) or (found[0][~others].isnan().all() and found[2][~others].isnan().all())
    for x, y in zip(found, clean, strict=True):
        assert x[others].isfinite().all()
        assert_close("others", x[others].float(), y[others].float(), **PREFILL[0])


def test_a_maximum_that_rises_from_tile_to_tile(record_error):
    """Differently in each head, by more and by less than O is rescaled for; and rows that have seen no key yet."""
    given = inputs(32, 16, 2048, 2048, pool=2048)
    direction, ramp = torch.randn(32, 16, 1, device="cuda").sign(), torch.linspace(-1, 1, 64, device="cuda")
    given["q"][..., 512:] = (direction * ramp).bfloat16()
    lift = torch.arange(2048, device="cuda") // 64 * 3.0 * 576**0.5 / 64
    given["kv"][:, 0, 512:] = (lift[:, None] * ramp).bfloat16()
    indices = given["indices"] = torch.arange(2048, dtype=torch.int32, device="cuda").expand(32, 1, -1).clone()
    indices[1::4, :, :1500] = indices[2::4, :, 100:] = -1
    checked(CASE, given, record_error)


@few_heads
def test_one_key_gives_its_value_exactly(heads):
    given, key = inputs(64, heads), torch.randint(0, 3000, (16,), device="cuda").repeat_interleave(4)
    given["indices"] = key[:, None, None].int()
    assert torch.equal(checked(CASE, given)[0], given["kv"][key, :, :512].expand(-1, heads, -1))


@few_heads
def test_a_part_of_a_tensor_is_written(heads):
    assert_writes_a_part(CASE, inputs(99, heads))


def test_strides_change_no_bit():
    given = inputs(50, 12)
    wide = torch.nn.functional.pad(given["indices"], (1, 2), value=5)[..., 1:701]
    change = {"q": among_nan(given["q"]), "kv": among_nan(given["kv"]), "indices": wide}
    assert_same_bits(CASE.run(given | change), CASE.run(given))


def rows_of(given, rows):
    return given | {name: given[name][rows] for name in ("q", "indices")}


@few_heads
def test_a_result_follows_from_its_group(heads):
    """Bit for bit, whatever the other groups are, and run after run."""
    given = inputs(600, heads)
    first = CASE.run(given)
    assert_runs_have_the_same_bits(CASE.run, given)
    for rows in (slice(64, 128), slice(592, 600), slice(0, 8)):
        assert_same_bits(CASE.run(rows_of(given, rows)), [x[rows] for x in first])


@few_heads
def test_a_batch_invariant_result_does_not_depend_on_other_queries(heads, record_error):
    """Bit for bit: alone, after others, in another order, among other selections. Without enable_batch_invariant it
    does depend on them."""
    given = inputs(600, heads)
    invariant = given | {"enable_batch_invariant": True}
    alone = checked(CASE, invariant, record_error)
    for rows in (slice(0, 1), slice(3, 67), slice(5, 600), slice(599, 600), torch.randperm(600, device="cuda")):
        assert_same_bits(CASE.run(rows_of(invariant, rows)), [x[rows] for x in alone])
    others = given["indices"].clone()
    others[1::2] = distinct(300, 3000, 700)[:, None]
    assert_same_bits([x[::2] for x in CASE.run(invariant | {"indices": others})], [x[::2] for x in alone])
    whole = torch.full((600, 64, 512), NAN, dtype=BF16, device="cuda")
    assert_same_bits(CASE.run(invariant | {"out": whole[:, :heads]}), alone)
    together, later = CASE.run(given), CASE.run(rows_of(given, slice(3, None)))
    assert not torch.equal(together[2], alone[2]) and not torch.equal(later[2], together[2][3:])


def test_a_graph_takes_new_selections(record_error):
    given = inputs(300, k=500)
    renewals = (inputs(300, k=500, pool=pool, seed=pool) for pool in (500, 700, 3000, 600))
    for found in replayed(lambda: CASE.run(given), given, renewals):
        assert_same_bits(found, checked(CASE, given, record_error))
