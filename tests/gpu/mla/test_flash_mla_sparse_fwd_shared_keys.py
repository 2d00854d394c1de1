"""Sparse MLA prefill of few heads where neighbouring queries share keys, on the GPU against the fp32 reference; and
which queries are computed together."""

import functools
import math

import pytest
import torch

from dsa.kernels.mla.query_group_limits import MEMBER_SHIFT, MOST_UNION
from dsa.kernels.mla.selection_union_sm90 import compile_selection_union
from dsa.ops.mla import _shared_keys as shared
from dsa.ops.mla import flash_mla_sparse_fwd as bridge
from dsa.runtime.known_calls import KnownCalls
from dsa.testing import assert_close
from tests.gpu.attention import BF16, INF, KINDS, NAN, assert_writes_a_part, distinct, int32, normal, spoiled
from tests.gpu.mla.test_flash_mla_sparse_fwd import LSE_TOLERANCE, TOLERANCE, check, run
from tests.gpu.op_checks import among_nan, assert_runs_have_the_same_bits, assert_same_bits, replays


@pytest.fixture(autouse=True)
def all_calls_may_share(monkeypatch):
    """Of any number of queries and indices. No call of another test is remembered here, nor of this one elsewhere."""
    monkeypatch.setattr(shared, "may_share", lambda *_: True)
    for op in (bridge._sparse_mla_prefill, bridge._sparse_mla_prefill.into):
        monkeypatch.setattr(op, "known", KnownCalls())


def overlapping(s_q, s_kv, k, pool):
    """Lists of k keys in random order; 16 neighbouring queries draw theirs from one pool of `pool` keys."""
    pools = torch.rand(-(-s_q // 16), s_kv, device="cuda").argsort(1)[:, :pool].repeat_interleave(16, 0)[:s_q]
    return pools.gather(1, distinct(s_q, pool, k).long()).int()[:, None].contiguous()


def inputs(s_q=61, heads=16, s_kv=3000, k=700, d=576, dtype=BF16, pool=1000):
    return normal(s_q, heads, d, dtype=dtype), normal(s_kv, 1, d, dtype=dtype), overlapping(s_q, s_kv, k, pool)


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
def test_heads(heads, d, dtype, record_error):
    sink = torch.randn(heads, device="cuda")
    check(*inputs(heads=heads, d=d, dtype=dtype), record_error, attn_sink=sink)


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("pool", [700, 800, 1200, 3000])
def test_overlaps(pool, heads, record_error):
    """All the same, much, little and nearly nothing in common; and each in a part of the queries."""
    check(*inputs(heads=heads, pool=pool), record_error)
    q, kv, indices = inputs(200, heads)
    indices[40:77], indices[120:] = distinct(37, 3000, 700)[:, None], overlapping(80, 3000, 700, pool)
    check(q, kv, indices, record_error)


@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize(
    ("s_q", "k"), [*((s_q, 200) for s_q in (1, 3, 4, 5, 8, 9, 63, 1061)), *((61, k) for k in (1, 2, 63, 64, 65, 2048))]
)
def test_queries_and_keys(s_q, k, heads, record_error):
    check(*inputs(s_q, heads, k=k, pool=min(3000, k + 40)), record_error)


@pytest.mark.parametrize("heads", [8, 16])
def test_disjoint_selections(heads, record_error):
    """That one query alone has keys, each another one, is a union without a key in common."""
    q, kv, indices = inputs(64, heads, k=200, pool=200)
    alone = torch.where(torch.arange(64, device="cuda")[:, None, None] % 8 == 3, indices, int32(-1))
    check(q, kv, alone, record_error)
    indices = torch.arange(64 * 40, device="cuda").view(64, 1, 40).int()
    check(q, kv, indices, record_error)


@pytest.mark.parametrize("heads", [8, 16])
def test_indices_that_are_no_keys(heads, record_error):
    q, kv, indices = inputs(90, heads)
    indices = spoiled(indices, 3000, 0.3)
    indices[5], indices[8:16], indices[88] = -1, 3000, -1
    out, max_logits, lse = check(q, kv, indices, record_error, attn_sink=torch.randn(heads, device="cuda"))
    for rows in (slice(5, 6), slice(8, 16), slice(88, 89)):
        assert not out[rows].any() and max_logits[rows].eq(-INF).all() and lse[rows].eq(INF).all()


@pytest.mark.parametrize("heads", [8, 16])
def test_topk_length(heads, record_error):
    """Keys behind it are NaN and not looked at."""
    q, kv, indices = inputs(67, heads, s_kv=4000)
    lengths = torch.randint(-50, 800, (67,), dtype=torch.int32, device="cuda")
    lengths[:5] = int32([0, 1, 64, 700, 2**31 - 1])
    indices = torch.where(torch.arange(700, device="cuda") < lengths[:, None, None], indices % 4000, int32(4000))
    kv = torch.cat((kv, kv[:1] * NAN))
    check(q, kv, indices, record_error, topk_length=lengths)


@pytest.mark.parametrize("heads", [8, 16])
def test_a_key_named_twice_counts_twice(heads, record_error):
    q, kv, indices = inputs(40, heads)
    indices[6, 0, 3], indices[20, 0, 699], indices[30] = indices[6, 0, 400], indices[20, 0, 0], 7
    _, max_logits, lse = check(q, kv, indices, record_error)
    assert_close("lse", lse[30], max_logits[30].double() + math.log(700), **LSE_TOLERANCE)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 300, 575])
@pytest.mark.parametrize("heads", [8, 16])
def test_nan_reaches_the_queries_that_select_it(heads, place, bad):
    """Not those that are computed together with one that does."""
    q, kv, indices = inputs(65, heads, k=700, pool=750)
    indices %= 2998
    indices = torch.stack([row.unique()[:500] for row in indices])[:, None].contiguous()
    clean = run(q, kv, indices)
    indices[2, 0, 123] = indices[64, 0, 1] = 2999
    kv[2999, 0, place] = bad
    out, max_logits, lse = run(q, kv, indices)
    touched = torch.zeros(65, dtype=torch.bool, device="cuda")
    touched[[2, 64]] = True
    if math.isnan(bad):
        assert out[touched].isnan().all() and lse[touched].isnan().all()
    for x in (out, max_logits, lse):
        assert x[~touched].isfinite().all()
    for x, y in zip((out, max_logits, lse), clean, strict=True):
        assert_close("others", x[~touched].float(), y[~touched].float(), **TOLERANCE)


def test_the_maximum_rises_from_tile_to_tile(record_error):
    """Of each head otherwise, by more and by less than O is rescaled for; and rows that have seen no key yet."""
    q, kv = normal(32, 16, 576), normal(2048, 1, 576)
    direction = torch.randn(32, 16, 1, device="cuda").sign()
    q[..., 512:] = (direction * torch.linspace(-1, 1, 64, device="cuda")).bfloat16()
    lift = torch.arange(2048, device="cuda") // 64 * 3.0 * 576**0.5 / 64
    kv[:, 0, 512:] = (lift[:, None] * torch.linspace(-1, 1, 64, device="cuda")).bfloat16()
    indices = torch.arange(2048, dtype=torch.int32, device="cuda").expand(32, 1, -1).clone()
    indices[1::4, :, :1500] = -1
    indices[2::4, :, 100:] = -1
    check(q, kv, indices, record_error)


@pytest.mark.parametrize("heads", [8, 16])
def test_one_key_gives_its_value_exactly(heads):
    q, kv, _ = inputs(64, heads)
    key = torch.randint(0, 3000, (16,), device="cuda").repeat_interleave(4)
    out, max_logits, lse = run(q, kv, key[:, None, None].int())
    assert torch.equal(out, kv[key, :, :512].expand(-1, heads, -1))
    logits = (q.double() * kv[key].double()).sum(2) * 576**-0.5
    assert_close("max_logits", max_logits, logits, **LSE_TOLERANCE)
    assert_close("lse", lse, logits, **LSE_TOLERANCE)


@pytest.mark.parametrize("heads", [8, 16])
def test_into_a_part_of_a_tensor(heads):
    given = inputs(99, heads)
    assert_writes_a_part(functools.partial(run, *given), run(*given))


def test_strides_change_no_bit():
    q, kv, indices = inputs(50, 12)
    wide_indices = torch.nn.functional.pad(indices, (1, 2), value=5)[..., 1:701]
    assert_same_bits(run(among_nan(q), among_nan(kv), wide_indices), run(q, kv, indices))


@pytest.mark.parametrize("heads", [8, 16])
def test_a_result_follows_from_its_group(heads):
    """Bit for bit, whatever the other groups are, and run after run."""
    q, kv, indices = inputs(600, heads)
    first = run(q, kv, indices)
    assert_runs_have_the_same_bits(run, q, kv, indices)
    for rows in (slice(64, 128), slice(592, 600), slice(0, 8)):
        assert_same_bits(run(q[rows], kv, indices[rows]), [x[rows] for x in first])


@pytest.mark.parametrize("heads", [8, 16])
def test_batch_invariance(heads, record_error):
    """Bit for bit: alone, behind others, in another order, among other selections. Where it is not asked for, it is not
    there."""
    q, kv, indices = inputs(600, heads)
    alone = check(q, kv, indices, record_error, enable_batch_invariant=True)
    for rows in (slice(0, 1), slice(3, 67), slice(5, 600), slice(599, 600)):
        got = run(q[rows], kv, indices[rows], enable_batch_invariant=True)
        assert_same_bits(got, [x[rows] for x in alone])
    order = torch.randperm(600, device="cuda")
    assert_same_bits(run(q[order], kv, indices[order], enable_batch_invariant=True), [x[order] for x in alone])
    others = indices.clone()
    others[1::2] = distinct(300, 3000, 700)[:, None]
    got = run(q, kv, others, enable_batch_invariant=True)
    assert_same_bits([x[::2] for x in got], [x[::2] for x in alone])
    whole = torch.full((600, 64, 512), NAN, dtype=q.dtype, device="cuda")
    assert_same_bits(run(q, kv, indices, out=whole[:, :heads], enable_batch_invariant=True), alone)
    together, behind = run(q, kv, indices), run(q[3:], kv, indices[3:])
    assert not torch.equal(together[2], alone[2]) and not torch.equal(behind[2], together[2][3:])


def test_a_graph_takes_new_data(record_error):
    given, pools = inputs(300, k=500), iter((500, 700, 3000, 600))
    for got in replays(run, given, lambda: inputs(300, k=500, pool=next(pools)), times=4):
        assert_same_bits(got, check(*given, record_error))
