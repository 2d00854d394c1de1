"""`flash_mla_with_kvcache` without indices, on the CPU: plans, splits, and launches."""

import math

import pytest
import torch

import dsa
from dsa.kernels.mla.limits import HEAD_DIM, HEAD_DIM_V
from dsa.kernels.mla.mla_combine_sm90 import FEW
from dsa.kernels.mla.mla_decode_sm90 import cluster_of
from dsa.ops.mla import flash_mla_with_kvcache as op
from dsa.reference.mla import mla_metadata
from dsa.runtime.recorded_calls import KnownCalls

DECODE, PLAN = torch.ops.dsa.dense_mla_decode, torch.ops.dsa.mla_metadata
D, D_V = HEAD_DIM, HEAD_DIM_V


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def inputs(s_q=2, h_q=4, h_k=1, page_size=16, dtype=torch.bfloat16):
    """Return q, cache, block table and lengths of three sequences, with three pages each in the block table."""
    q, cache = torch.randn(3, s_q, h_q, D).to(dtype), torch.randn(10, page_size, h_k, D).to(dtype)
    return q, cache, torch.randperm(10)[:9].view(3, 3).int(), i32([2 * page_size + 5, 0, page_size])


def layout(x):
    return x.shape, x.stride(), x.dtype


def assert_same(got, expected):
    for x, y in zip(got, expected, strict=True):
        assert layout(x) == layout(y) and torch.equal(x, y)


def wider(x, before, after):
    return torch.nn.functional.pad(x, (before, after))[..., before : before + x.shape[-1]]


ANY_PLAN = (torch.zeros(7, 8, dtype=torch.int32), i32([0] * 4))


PLANS, DECODES = "mla_plan", ["mla_decode", "mla_combine"]


def names(named_launches):
    return [name for name, _, _ in named_launches]


def decoded(*arguments, **options):
    return dsa.flash_mla_with_kvcache(*arguments[:4], D_V, *(arguments[4:] or (None,)), **options)


def test_a_plan_is_made_once_and_remembered(named_launches):
    (*arguments, lengths), (meta, _) = inputs(), dsa.get_mla_metadata()
    decoded(*arguments, lengths, meta)
    planned, plan, num_splits, overhead = named_launches[0][2]
    assert planned is lengths and plan is meta.tile_scheduler_metadata and num_splits is meta.num_splits
    assert layout(num_splits) == ((4,), (1,), torch.int32) and overhead == op.OVERHEAD_OF_SHORT
    decoded(*arguments, lengths + 1, meta)
    assert names(named_launches) == [PLANS, *DECODES, *DECODES]
    assert all(named_launches[i][2][4] is plan and named_launches[i][2][5] is num_splits for i in (1, 3))
    with pytest.raises(ValueError, match="tile_scheduler_metadata: was first used with"):
        decoded(*inputs(s_q=1), meta)
    # Without a plan, every call makes one. With a plan from get_mla_metadata(lengths, ...), no call makes one.
    for _ in range(2):
        decoded(*arguments, lengths)
    decoded(*arguments, lengths, *(old := dsa.get_mla_metadata(lengths, 8, 1)))
    assert names(named_launches[5:]) == [PLANS, *DECODES] * 3
    assert all(x is y for x, y in zip(old, named_launches[-2][2][4:6], strict=True))


def test_a_plan_that_comes_with_a_graph_serves_that_graph_alone(named_launches, monkeypatch):
    """A plan that is made during a capture has contents only when the graph is replayed. So calls outside this capture
    need another plan. A plan that is made outside of captures serves all calls."""
    arguments, (meta, _) = inputs(), dsa.get_mla_metadata()
    for capture, plans in ((7, True), (7, False), (8, True), (None, True), (None, False), (9, False)):
        monkeypatch.setattr(op, "capture_number", lambda _, capture=capture: capture)
        named_launches.clear()
        decoded(*arguments, meta)
        assert names(named_launches) == [PLANS] * plans + DECODES
        assert named_launches[-2][2][4] is meta.tile_scheduler_metadata and named_launches[-2][2][5] is meta.num_splits


SHAPES = [(1, 1, 1, 132), (1, 64, 1, 132), (1, 65, 1, 66), (3, 64, 1, 44), (2, 128, 8, 16), (5, 128, 2, 13)]


@pytest.mark.parametrize(("s_q", "h_q", "h_k", "parts"), [*SHAPES, (260, 64, 1, 1)])
def test_the_plan_has_as_many_parts_as_there_are_ctas_for_it(s_q, h_q, h_k, parts, named_launches):
    """1000 pages of 16 keys per sequence are enough work for all CTAs."""
    (q, cache, _, lengths), rows = inputs(s_q, h_q, h_k), s_q * h_q // h_k
    arguments = q, cache, torch.zeros(3, 1000, dtype=torch.int32), lengths
    decoded(*arguments)
    (_, _, (_, plan, _, overhead)), (_, variant, got), _ = named_launches
    assert layout(plan) == ((parts, 8), (8, 1), torch.int32) and variant == ("bfloat16", 16, cluster_of(rows))
    assert overhead == (op.OVERHEAD_OF_LONG if parts > 3 else op.OVERHEAD)
    assert got[8].shape == (2 * parts, h_k, rows, D_V) and got[9].shape == (2 * parts, h_k, rows)
    assert got[8].dtype == got[9].dtype == torch.float32 and got[8].is_contiguous() and got[9].is_contiguous()
    old = [layout(x) for x in dsa.get_mla_metadata(arguments[3], rows, h_k)]
    assert old == [layout(x) for x in PLAN(arguments[3].to("meta"), rows, h_k, 0)] and old[0] == layout(plan)
    # The workspace has room for two partial results per part of the given plan.
    decoded(*arguments, *ANY_PLAN)
    assert named_launches[-2][2][8].shape == (14, h_k, rows, D_V)


WHOLE = [(128, 128, 4096, True), (128, 64, 4096, True), (132, 128, 65536, True)]
WHOLE += [(128, 128, 16384, False), (80, 128, 4096, False), (3, 64, 65536, False)]


@pytest.mark.parametrize(("batch", "heads", "keys", "whole"), WHOLE)
def test_plans_that_leave_sequences_whole(batch, heads, keys, whole, monkeypatch):
    """All sequences have the same length. None is split if a part's largest number of tiles is enough for ceil(batch /
    parts) sequences."""
    monkeypatch.setattr(op.backends, "num_sms", lambda _: 132)
    parts, overhead = op._parts(torch.full((batch,), keys, dtype=torch.int32), heads, 1, keys)
    assert overhead == (op.OVERHEAD if whole else op.OVERHEAD_OF_LONG)
    each, most = keys // 64 + op.OVERHEAD, -(-batch * (keys // 64 + op.OVERHEAD) // parts) + op.OVERHEAD
    assert whole == (-(-batch // parts) <= most // each)


# (pages per sequence in the block table, parts of the plan, fixed cost per sequence in key tiles, whether a part has
# few tiles). There are three sequences, pages of 16 keys, 132 SMs, and two row tiles (128 rows).
SHORT = [(1, 3, 0, True), (40, 30, 0, True), (44, 33, 0, True), (176, 33, 0, True), (180, 66, 5, True)]
SHORT += [(352, 66, 5, True), (356, 66, 2, False)]


@pytest.mark.parametrize(("pages", "parts", "overhead", "short"), SHORT)
def test_plans_of_short_sequences(pages, parts, overhead, short, named_launches):
    """The room of the block table in key tiles determines the number of parts. Up to HALVED * 66 tiles, there is a part
    per tile, but at most 33 parts. Above that there are 66, because two row tiles share 132 SMs. CTAs form no clusters
    if a part has few tiles. get_mla_metadata(lengths, ...) does not know the block table, so it makes 66 parts."""
    q, cache, _, lengths = inputs(h_q=64)
    decoded(q, cache, table := torch.zeros(3, pages, dtype=torch.int32), lengths)
    (_, _, (_, plan, _, cost)), (_, decode, _), _ = named_launches
    assert (len(plan), cost, decode[2]) == (parts, overhead, 1 if short else 2)
    decoded(q, cache, table, lengths, *dsa.get_mla_metadata(lengths, 128, 1))
    assert (len(named_launches[3][2][1]), named_launches[3][2][3]) == (66, op.OVERHEAD)


# (heads, pages of 16 keys per sequence, parts per sequence, whether few CTAs combine), for three sequences.
@pytest.mark.parametrize(
    ("heads", "pages", "parts", "few"),
    [(64, 64, 16, False), (128, 64, 11, True), (128, 176, 11, True), (128, 180, 22, False), (128, 400, 22, False)],
)
def test_few_ctas_combine_few_parts_of_many_rows(heads, pages, parts, few, named_launches):
    q, cache, _, lengths = inputs(1, heads, 1)
    decoded(q, cache, torch.zeros(3, pages, dtype=torch.int32), lengths)
    (_, _, (_, plan, *_)), _, (_, combine, _) = named_launches
    assert (len(plan) // 3, combine[1] == FEW) == (parts, few)


SPLITS = [(1, 16, 1), (256, 16, 1), (257, 16, 2), (31, 4096, 31), (32, 4096, 32), (32, 4112, 32), (4, 2**30, 32)]


@pytest.mark.parametrize("plan", [ANY_PLAN, (None, None)])
@pytest.mark.parametrize(("pages", "page_size", "splits"), SPLITS)
def test_batch_invariant_splits_follow_the_capacity(pages, page_size, splits, plan, named_launches):
    q, cache, _, lengths = inputs()
    cache, table = cache[:1, :1].expand(1, page_size, 1, D), torch.zeros(3, pages, dtype=torch.int32)
    decoded(q, cache, table, lengths, *plan, enable_batch_invariant=True)
    assert names(named_launches) == DECODES[: 1 + (splits > 1)]
    got, capacity = named_launches[0][2], min(pages * page_size, 2**31 - 64)
    assert all(arguments[-2:] == (capacity, splits) for _, _, arguments in named_launches)
    assert got[8].shape == (3 * splits, 1, 8, D_V) and got[9].shape == (3 * splits, 1, 8)
    # The kernel does not read the plan, so it gets a placeholder.
    assert got[4] is not plan[0] and layout(got[4])[1:] == ((8, 1), torch.int32)


def test_batch_invariant_kernels_do_not_depend_on_the_batch(named_launches):
    """Other kernels would add the splits in another order."""
    (q, cache, _, lengths), tables = inputs(h_q=64), torch.zeros(3, 5000, dtype=torch.int32)
    for batch, pages in ((1, 257), (3, 257), (3, 5000), (1, 5000)):
        decoded(q[:batch], cache, tables[:batch, :pages], lengths[:batch], enable_batch_invariant=True)
    assert names(named_launches) == DECODES * 4
    for launched in (named_launches[::2], named_launches[1::2]):
        assert len({variant for _, variant, _ in launched}) == 1


@pytest.mark.parametrize("style", ["old", "new", None, "batch-invariant"])
@pytest.mark.parametrize("sizes", [(0, 2, 4, 9, 3), (3, 0, 4, 9, 3), (3, 2, 0, 9, 3), (3, 2, 4, 0, 3), (3, 2, 4, 9, 0)])
def test_nothing_to_attend_to(sizes, style, named_launches):
    (q, cache, table, lengths), (batch, s_q, h_q, pages, width) = inputs(), sizes
    q, cache, table, lengths = q[:batch, :s_q, :h_q], cache[:pages], table[:batch, :width], lengths[:batch]
    plan = {"old": dsa.get_mla_metadata(lengths, 8, 1), "new": dsa.get_mla_metadata()}.get(style, (None, None))
    named_launches.clear()
    out, lse = decoded(q, cache, table, lengths, *plan, enable_batch_invariant=style == "batch-invariant")
    assert out.shape == (batch, s_q, h_q, D_V) and out.dtype == q.dtype and out.eq(0).all()
    assert lse.shape == (batch, h_q, s_q) and lse.dtype == torch.float32 and lse.eq(math.inf).all()
    # A call without a plan, or with an empty FlashMLASchedMeta, may make a plan although it attends to nothing.
    assert not named_launches or (names(named_launches) == [PLANS] and style in ("new", None) and batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_into_a_part_of_a_tensor(dtype):
    arguments, (meta, _) = inputs(dtype=dtype), dsa.get_mla_metadata()
    expected = decoded(*arguments, causal=True)
    whole = torch.full((3, 2, 7, D_V), 7.0, dtype=dtype)
    for plan in ((None,), dsa.get_mla_metadata(arguments[3], 8, 1), (meta,), (meta,)):
        out = whole.fill_(7.0)[:, :, 2:6]
        got = decoded(*arguments, *plan, causal=True, out=out)
        assert got[0] is out and torch.equal(out, expected[0])
        assert_same(got[1:], expected[1:])
        assert (whole[:, :, :2] == 7).all() and (whole[:, :, 6:] == 7).all()


class Foreign:
    """An object with the fields of FlashMLASchedMeta."""

    def __init__(self, plan=None, num_splits=None, config=None):
        self.have_initialized, self.config = plan is not None, config
        self.tile_scheduler_metadata, self.num_splits = plan, num_splits


@pytest.mark.parametrize("filled", [False, True])
def test_an_object_of_another_library(filled, named_launches):
    (*arguments, lengths) = inputs()
    theirs = (torch.full((132, 8), 9, dtype=torch.int32), i32([9] * 4), object()) if filled else (None, None, None)
    meta = Foreign(*theirs)
    for _ in range(2):
        decoded(*arguments, lengths, meta)
    assert names(named_launches) == [PLANS, *DECODES, *DECODES]
    plan = named_launches[0][2][1]
    assert all(named_launches[i][2][4] is plan for i in (1, 3)) and plan is not theirs[0]
    assert (meta.tile_scheduler_metadata, meta.num_splits, meta.config) == theirs and meta.have_initialized is filled
    with pytest.raises(ValueError, match="tile_scheduler_metadata: was first used with"):
        decoded(*inputs(s_q=1), meta)
    with pytest.raises(ValueError, match="num_splits: must be None with a FlashMLASchedMeta, got Tensor"):
        decoded(*arguments, lengths, meta, i32([0] * 4))


def test_an_object_that_keeps_nothing(named_launches):
    def refuse(self, name, value):
        raise AttributeError(name)

    closed = Foreign()
    closed.__class__ = type("Closed", (Foreign,), {"__setattr__": refuse})
    with pytest.raises(TypeError, match=r"tile_scheduler_metadata: must be an object that takes attributes, .* Closed"):
        decoded(*inputs(), closed)
    accepted = "tile_scheduler_metadata: must be a FlashMLASchedMeta, an object with its fields .* or None, got "
    for wrong, name in ((object(), "object"), (dsa.FlashMLASchedMeta, "the class FlashMLASchedMeta"), ("plan", "str")):
        with pytest.raises(TypeError, match=accepted + name):
            decoded(*inputs(), wrong)


def test_which_plans_the_kernel_makes(named_launches):
    plan, num_splits = dsa.get_mla_metadata(i32([]), 16, 1)
    assert layout(plan) == ((132, 8), (8, 1), torch.int32) and num_splits.tolist() == [0]
    assert plan[:, :6].eq(-1).all() and plan[:, 6:].eq(0).all()
    # For selected keys (topk is given), the reference makes the plan.
    arguments = (i32([70, 0, 128]), 16, 1, 16, True, 2048)
    assert_same(dsa.get_mla_metadata(*arguments), mla_metadata.get_mla_metadata(*arguments))
    many = torch.zeros(32769, dtype=torch.int32)
    with pytest.raises(ValueError, match="cache_seqlens: the kernel takes at most 32768 for B, got 32769"):
        dsa.get_mla_metadata(many, 16, 1)
    assert not named_launches
    dsa.get_mla_metadata(many[1:], 16, 1)
    assert names(named_launches) == [PLANS] and named_launches[0][2][2].shape == (32769,)


def test_queries_are_copied_only_if_their_rows_are_not_aligned(named_launches):
    q, cache, table, lengths = inputs(h_k=2)
    channels, tokens = q.transpose(2, 3).contiguous().transpose(2, 3), q.transpose(0, 1).contiguous().transpose(0, 1)
    for wrong in (wider(q, 1, 7), wider(q, 0, 4), wider(q, 4, 4), channels, q.repeat_interleave(2, 3)[..., ::2]):
        decoded(wrong, cache, table, lengths)
        got = named_launches[-2][2][0]
        assert layout(got) == layout(q) and torch.equal(got, q) and got.data_ptr() % 16 == 0
    # Slices and strided views are not copied if the rows of q start at multiples of 16 bytes.
    keys, rows, apart = wider(cache, 8, 56), wider(table, 1, 4), torch.stack((lengths, lengths), 1)[:, 1]
    for right in (wider(q, 0, 8), wider(q, 8, 0), tokens, q[:, :1].expand_as(q)):
        decoded(right, keys, rows, apart)
        assert all(x is y for x, y in zip(named_launches[-2][2][:4], (right, keys, rows, apart), strict=True))


@pytest.mark.parametrize("style", ["old", "new", None, "batch-invariant"])
def test_torch_compile(style):
    def attention(q, cache, table, lengths, meta):
        plan = dsa.get_mla_metadata(lengths, 8, 1) if style == "old" else (meta, None)
        first = decoded(q, cache, table, lengths, *plan, enable_batch_invariant=style == "batch-invariant")
        return *first, *decoded(q * 2, cache, table, lengths, *plan)

    arguments, (meta, eager) = inputs(), [dsa.FlashMLASchedMeta() if style == "new" else None for _ in range(2)]
    compiled, expected = torch.compile(attention, fullgraph=False, backend="aot_eager"), attention(*arguments, eager)
    for _ in range(2):
        assert_same(compiled(*arguments, meta), expected)
    if style == "new":
        assert meta.config == eager.config and torch.equal(meta.tile_scheduler_metadata, eager.tile_scheduler_metadata)


def test_a_call_like_one_before_is_not_checked_again(named_launches, monkeypatch):
    (q, cache, table, lengths), checked = inputs(h_q=64), []
    check = op._dense_mla_decode.arguments.check
    monkeypatch.setattr(op._dense_mla_decode, "known", KnownCalls())
    monkeypatch.setattr(op._dense_mla_decode.arguments, "check", lambda *a: (checked.append(a), check(*a))[1])
    metas = [dsa.get_mla_metadata()[0] for _ in range(2)]
    for meta in (*metas, *metas):
        decoded(q, cache, table, lengths, meta)
    assert len(checked) == 2  # in the first call: once before the plan is made, and once with the plan
    with pytest.raises(ValueError, match="k_cache: the last dimension must be contiguous"):
        decoded(q, cache.repeat_interleave(2, 3)[..., ::2], table, lengths, metas[0])
    with pytest.raises(ValueError, match="was first used with"):
        decoded(q[:, :1], cache, table, lengths, metas[0])
