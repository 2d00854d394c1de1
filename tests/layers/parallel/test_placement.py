"""Placements of passes on several ranks: ranks shard, gather and sum rows."""

import pytest
import torch

from dsa_layers import Ranks, SequenceBatch, fuse
from dsa_layers.batch.placement import WHOLE, Placement
from dsa_layers.engine import fused_moe
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE
from dsa_layers.layers.rope import RopeAngles
from dsa_layers.parallel.placement import SHARDED_TOKENS, Replicated, Sharded, placement_of
from dsa_layers.parallel.ranks import ALONE
from tests.layers.parallel.processes import in_ranks

COUNTS = (1, 6, 7, 301)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)


def whole(count, dtype):
    return (torch.arange(count * 8).view(count, 2, 4) % 100).to(dtype)


def part(rank, count):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, 5, generator=generator, dtype=torch.float64).mul(10.0**rank).to(torch.bfloat16)


def check_local_rows(rows, own, every):
    """Check the local rows, bounds and angles of placement `rows`. own, every: indices of local and all rows."""
    shared = torch.arange(5).expand(len(every), 5)  # all tokens share one row in memory
    assert torch.equal(rows.local(shared), torch.arange(5).repeat(len(own), 1))
    assert torch.equal(rows.all_gather(rows.local(shared))[0], shared)
    assert rows.local_cached(every) is rows.local_cached(every) and torch.equal(rows.local_cached(every), own)
    bounds = torch.tensor([0, 1, 1, len(every) // 3, len(every) - 1, len(every)], dtype=torch.int32)
    assert rows.local_bounds(bounds).tolist() == [int((own < bound).sum()) for bound in bounds.tolist()]
    angles = rows.local_cached(RopeAngles((every.float(), every.float() + 1)))
    assert torch.equal(angles[0], own) and torch.equal(angles[1], own + 1) and isinstance(angles, RopeAngles)


def check_gathered_rows(rows, own, every):
    """Check a gather of whole tensors, and gathers of non-contiguous slices while two other gathers are running."""
    tensors = [whole(len(every), dtype) for dtype in DTYPES]
    local = [rows.local(x) for x in tensors]
    begun, other = rows.start_all_gather(*local), rows.start_all_gather(own)
    columns = rows.all_gather(local[0][:, 0], local[1][:, 0], local[0][:, 1])
    sliced = rows.all_gather(*(x[:, :, 1:] for x in local))
    assert torch.equal(other()[0], every)
    for found, expected in [
        *zip(begun(), tensors, strict=True),
        *zip(sliced, (x[:, :, 1:] for x in tensors), strict=True),
        *zip(columns, (tensors[0][:, 0], tensors[1][:, 0], tensors[0][:, 1]), strict=True),
    ]:
        assert found.dtype == expected.dtype and torch.equal(found.float(), expected.float())


def sums(ranks, rows, own, every):
    """Return this rank's rows of (the ranks' sum in five ways; twice the sum plus a shared part and a residual)."""
    count, whole_rows = len(every), Replicated(ranks)
    x = part(ranks.rank, count)
    total, doubled = rows.start_reduce(x), rows.start_reduce(2 * x)
    started, more = total(), doubled(rows.local(part(8, count)), rows.local(part(9, count)))
    experts = x, every[:, None].int(), torch.ones(count, 1)
    of_whole_rows = [ranks.sum(x), whole_rows.reduce(x), whole_rows.reduce_experts(*experts)]
    return [rows.reduce(x), started, *map(rows.local, of_whole_rows)], more


def exchanged(ranks):
    found = []
    for count in COUNTS:
        rows, every = Sharded(ranks, count), torch.arange(count)
        own = rows.local(every)
        check_local_rows(rows, own, every)
        check_gathered_rows(rows, own, every)
        found.append((own, *sums(ranks, rows, own, every)))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_sharded_rows_are_gathered_whole_and_summed_as_whole_rows_are(size):
    of_ranks = in_ranks(size, exchanged)
    for i, count in enumerate(COUNTS):
        owned = torch.cat([found[i][0] for found in of_ranks])
        assert owned.sort().values.tolist() == list(range(count))
        pairs = [int((found[i][0] + 1).sum()) for found in of_ranks]
        assert max(pairs) - min(pairs) <= 2 * count
        for own, totals, more in (found[i] for found in of_ranks):
            expected = sum(part(rank, count).float() for rank in range(size))[own]
            assert all(torch.equal(rows, expected.bfloat16()) for rows in totals)
            # The sum and the shared part are rounded together once. Adding the residual rounds again.
            expected = part(9, count)[own] + (2 * expected + part(8, count).float()[own]).bfloat16()
            assert torch.equal(more, expected)


class FirstHalf(Placement):
    """Placement with the first half of the rows. whole: the tensors that successive `all_gather` calls return."""

    is_split = sharded = True

    def __init__(self, *whole):
        self.whole, self.sent = whole, []

    def local(self, x):
        return x[: len(x) // 2]

    def reduce(self, part):
        return self.local(part)

    def all_gather(self, *local):
        first = len(self.sent)
        self.sent += local
        return self.whole[first : len(self.sent)]


@pytest.mark.parametrize("fp4_experts", [False, True])
@torch.inference_mode()
def test_experts_send_casts_of_their_rows(fp4_experts):
    router = GroupedSigmoidRouter(256, 6, 2, dtype=torch.bfloat16)
    moe = fuse(MoE(256, 128, router, fp8=True, fp4_experts=fp4_experts))
    x = torch.randn(10, 256).bfloat16()
    cast, choice = moe.shared_experts.gate_proj.cast(x), moe.gate(x)
    rows = FirstHalf(*cast, *choice)
    own = tuple(map(rows.local, cast))
    expected = rows.local(moe.experts(x, *choice)) + moe.shared_experts(rows.local(x))
    assert torch.equal(moe(rows.local(x), cast=own, placement=rows), expected)
    assert {tensor.dtype for tensor in rows.sent} == {torch.float8_e4m3fn, torch.float32, torch.int64}
    # For each of 5 rows: 256 FP8 values with 2 fp32 scales, and an int64 index and an fp32 weight per chosen expert.
    assert sum(tensor.nbytes for tensor in rows.sent) == 5 * (256 + 2 * 4 + 2 * (8 + 4))


class Noting(FirstHalf):
    """`FirstHalf` that appends to `events` when a gather or a reduction begins and when it ends."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def start_all_gather(self, *local):
        self.events.append("gather")
        return lambda: self.events.append("gathered") or [torch.cat((x, x)) for x in local]

    def start_reduce(self, part):
        self.events.append("reduce")
        return lambda shared, residual: self.events.append("reduced") or self.local(part) + shared


@torch.inference_mode()
def test_ranks_compute_while_rows_are_on_their_way(monkeypatch):
    """The router ("choose") runs while rows are gathered, the shared expert ("product") while ranks sum outputs."""
    events = []

    def note(owner, name):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **options: events.append(name) or function(*given, **options))

    note(fused_moe, "choose")
    note(fused_moe.FusedSwiGLU, "product")
    moe = fuse(MoE(256, 128, GroupedSigmoidRouter(256, 6, 2, dtype=torch.bfloat16), fp8=True))
    x = torch.randn(10, 256).bfloat16()
    moe(x, cast=moe.shared_experts.gate_proj.cast(x), placement=Noting(events))
    assert events == ["gather", "choose", "gather", "gathered", "gathered", "reduce", "product", "reduced"]


def test_few_rows_and_decoding_are_not_sharded():
    long, short = (SequenceBatch.without_cache([SHARDED_TOKENS // 2, n]) for n in (SHARDED_TOKENS // 2, 1))
    two = Ranks(0, 2)
    assert isinstance(placement_of(long, two), Sharded) and isinstance(placement_of(short, two), Replicated)
    assert isinstance(placement_of(SequenceBatch.without_cache([1] * 2 * SHARDED_TOKENS), two), Replicated)
    assert placement_of(long, ALONE) is WHOLE
    assert placement_of(long, Ranks(0, 2)) is placement_of(long, two) is not placement_of(long, Ranks(1, 2))
