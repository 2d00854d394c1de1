"""Rows that ranks share: every row is one rank's, gathered rows are the whole, and sums those of whole rows."""

import contextlib
import functools
import time
from unittest import mock

import pytest
import torch

from dsa_layers.batch.placement import WHOLE, Placement
from dsa_layers.batch.sequence_batch import SequenceBatch
from dsa_layers.engine import fused_moe
from dsa_layers.engine.fuse import fuse
from dsa_layers.engine.fused_moe import FusedSwiGLU
from dsa_layers.layers.moe import GroupedSigmoidRouter, MoE
from dsa_layers.layers.rope import RopeAngles
from dsa_layers.parallel.placement import SHARDED_TOKENS, Replicated, Sharded, placement_of
from dsa_layers.parallel.ranks import ALONE, Ranks
from tests.layers.parallel.processes import in_ranks

COUNTS = (1, 6, 7, 11, 256, 301)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64)


def whole(count, dtype):
    return (torch.arange(count * 8).view(count, 2, 4) % 100).to(dtype)


def part(rank, count):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, 5, generator=generator, dtype=torch.float64).mul(10.0**rank).to(torch.bfloat16)


def exchanged(ranks):
    """Of every count: (own rows' numbers, all of several tensors gathered at once, own rows of the sum, and of the sum
    of whole rows)."""
    found = []
    for count in COUNTS:
        rows = Sharded(ranks, count)
        own = rows.local(torch.arange(count))
        # Not contiguous, as a slice of channels is not.
        gathered = rows.all_gather(*(rows.local(whole(count, dtype))[:, :, 1:] for dtype in DTYPES), own)
        every = torch.arange(count)
        shared = torch.arange(5).expand(count, 5)
        assert torch.equal(rows.local(shared), torch.arange(5).repeat(len(own), 1))
        assert torch.equal(rows.all_gather(rows.local(shared))[0], shared)
        assert count == 1 or rows.local(shared).untyped_storage().nbytes() == 5 * 8  # one row in memory
        assert rows.local_cached(every) is rows.local_cached(every) and torch.equal(rows.local_cached(every), own)
        bounds = torch.tensor([0, 1, 1, count // 3, count - 1, count], dtype=torch.int32)
        assert rows.local_bounds(bounds).dtype == torch.int32
        assert rows.local_bounds(bounds).tolist() == [int((own < bound).sum()) for bound in bounds.tolist()]
        angles = RopeAngles((every.float(), every.float() + 1))
        assert rows.local_cached(angles).back is rows.local_cached(angles).back
        assert all(torch.equal(x, y) for x, y in zip(rows.local_cached(angles), (own, own + 1)))
        joined = rows.start_joint_all_gather(*(rows.local(whole(count, DTYPES[0]))[:, i] for i in range(2)))()
        assert all(torch.equal(x, whole(count, DTYPES[0])[:, i]) for i, x in enumerate(joined))
        mixed = rows.start_joint_all_gather(*(rows.local(whole(count, dtype))[:, 0] for dtype in DTYPES[:2]))()
        assert all(x.dtype == dtype and torch.equal(x, whole(count, dtype)[:, 0]) for x, dtype in zip(mixed, DTYPES))
        begun = rows.start_all_gather(*(rows.local(whole(count, dtype)) for dtype in DTYPES))
        other_begun = rows.start_all_gather(own)
        assert all(torch.equal(x.float(), whole(count, dtype).float()) for x, dtype in zip(begun(), DTYPES))
        assert torch.equal(*other_begun(), every)
        x = part(ranks.rank, count)
        total, other = rows.start_reduce(x), rows.start_reduce(2 * x)
        begun = total(), other(rows.local(part(8, count)), rows.local(part(9, count)))
        experts = x, every[:, None].int(), torch.ones(count, 1)
        of_experts = rows.reduce_experts(*experts), rows.local(Replicated(ranks).reduce_experts(*experts))
        sums = rows.reduce(x), rows.local(ranks.sum(x)), rows.local(Replicated(ranks).reduce(x)), begun[0], *of_experts
        found.append((own, gathered, begun[1], *sums))
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_rows_of_ranks(size):
    of_ranks = in_ranks(size, exchanged)
    for i, count in enumerate(COUNTS):
        owned = torch.cat([found[i][0] for found in of_ranks])
        assert owned.sort().values.tolist() == list(range(count))
        pairs = [int((found[i][0] + 1).sum()) for found in of_ranks]  # a query sees one key more than the one before
        assert max(pairs) - min(pairs) <= 2 * count
        for own, (*gathered, numbers), more, *sums in (found[i] for found in of_ranks):
            assert numbers.tolist() == list(range(count))
            for dtype, x in zip(DTYPES, gathered):
                assert x.dtype == dtype and torch.equal(x.float(), whole(count, dtype)[:, :, 1:].float()), dtype
            expected = sum(part(rank, count).float() for rank in range(size))[own]
            assert all(torch.equal(rows, expected.bfloat16()) for rows in sums)
            # Rounded once with what is shared, and once more with the residual.
            expected = part(9, count)[own] + (2 * expected + part(8, count).float()[own]).bfloat16()
            assert torch.equal(more, expected)


class FirstHalf(Placement):
    """The first half of the rows. whole: the results of `all_gather`, in the order of the calls."""

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
    """A byte per channel; the result has the bits of a process with all rows."""
    router = GroupedSigmoidRouter(256, 6, 2, dtype=torch.bfloat16)
    moe = fuse(MoE(256, 128, router, fp8=True, fp4_experts=fp4_experts))
    x = torch.randn(10, 256).bfloat16()
    cast, choice = moe.shared_experts.gate_proj.cast(x), moe.gate(x)
    rows = FirstHalf(*cast, *choice)
    own = tuple(map(rows.local, cast))
    expected = rows.local(moe.experts(x, *choice)) + moe.shared_experts(rows.local(x))
    assert torch.equal(moe(rows.local(x), cast=own, placement=rows), expected)
    assert {tensor.dtype for tensor in rows.sent} == {torch.float8_e4m3fn, torch.float32, torch.int64}
    assert sum(tensor.nbytes for tensor in rows.sent) == 5 * (256 + 2 * 4 + 2 * (8 + 4))


PATIENCE = 20  # seconds for what takes one


def await_file(path):
    until = time.monotonic() + PATIENCE
    while not path.exists():
        assert time.monotonic() < until, f"{path.name}: the first rank waits for this one before it computes"
        time.sleep(0.01)


@torch.inference_mode()
def with_a_late_rank(ranks, folder):
    """(whether the result is as ever, what the first rank has computed when it begins each exchange). The second rank
    sends its rows after the first one has chosen experts, and its part of the sum after the first one has computed the
    shared expert."""
    torch.manual_seed(0)
    moe = fuse(MoE(256, 128, GroupedSigmoidRouter(256, 6, 2, dtype=torch.bfloat16), fp8=True))
    x, rows = torch.randn(270, 256).bfloat16(), Sharded(ranks, 270)
    cast = tuple(map(rows.local, moe.shared_experts.gate_proj.cast(x)))
    expected = moe(rows.local(x), cast=cast, placement=rows)
    chosen, shared, begun = folder / "chosen", folder / "shared", []

    def wrap(owner, name, before, after):
        function = getattr(owner, name)

        def call(*arguments, **options):
            before()
            result = function(*arguments, **options)
            after()
            return result

        return mock.patch.object(owner, name, call)

    def nothing():
        pass

    def note():
        begun.append((chosen.exists(), shared.exists()))

    if ranks.rank == 0:
        changes = [(fused_moe, "choose", nothing, chosen.touch), (FusedSwiGLU, "product", nothing, shared.touch)]
        changes += [(Sharded, name, note, nothing) for name in ("_start_all_gather", "_start_reduce")]
    else:
        files = {"_start_all_gather": chosen, "_start_reduce": shared}
        changes = [(Sharded, name, functools.partial(await_file, file), nothing) for name, file in files.items()]
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(wrap(*change))
        late = moe(rows.local(x), cast=cast, placement=rows)
    return torch.equal(late, expected), begun


def test_ranks_compute_while_they_await_others(tmp_path):
    first, second = in_ranks(2, with_a_late_rank, tmp_path)
    assert first == (True, [(False, False), (True, False), (True, False)]) and second == (True, [])


def test_few_rows_and_decoding_are_whole():
    long, short = (SequenceBatch.without_cache([SHARDED_TOKENS // 2, n]) for n in (SHARDED_TOKENS // 2, 1))
    two = Ranks(0, 2)
    assert isinstance(placement_of(long, two), Sharded) and isinstance(placement_of(short, two), Replicated)
    assert isinstance(placement_of(SequenceBatch.without_cache([1] * 2 * SHARDED_TOKENS), two), Replicated)
    assert placement_of(long, ALONE) is WHOLE


def test_all_layers_of_a_pass_get_the_same_shared_rows():
    batch, other = (SequenceBatch.without_cache([SHARDED_TOKENS]) for _ in range(2))
    assert placement_of(batch, Ranks(0, 2)) is placement_of(batch, Ranks(0, 2)) is not placement_of(other, Ranks(0, 2))
    assert placement_of(batch, Ranks(1, 2)) is not placement_of(batch, Ranks(0, 2))
