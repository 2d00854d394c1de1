"""Dense MLA decoding on the GPU against fp64: FlashMLA's tolerances, its users' troubles, and its plan."""

import functools
import itertools

import pytest
import torch

import dsa
from dsa.kernels.mla.mla_plan_sm90 import compile_mla_plan
from dsa.ops.mla.flash_mla_with_kvcache import OVERHEAD, _mla_metadata, _parts
from dsa.testing import assert_close, poison_free_memory, poisoned
from tests.gpu.attention import BF16, D_V, FP16, NAN, assert_attention, assert_writes_a_part, attend, int32, normal
from tests.gpu.op_checks import (
    among_nan,
    assert_runs_have_the_same_bits,
    assert_runs_on_the_current_stream,
    assert_same_bits,
    captured,
    replays,
)

D, TILE = 576, 64
TOLERANCE = {"abs_tol": 8e-4, "rel_tol": 2.01 / 128, "cos_tol": 5e-6}
LSE_TOLERANCE = {"abs_tol": 1e-6, "rel_tol": 8.01 / 65536}
GARBAGE = torch.tensor([-1, 2147480000, -(2**31)], dtype=torch.int32)
BOUNDARIES = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000]


class Case:
    """Sequences in random pages of a cache whose other rows are NaN; garbage in the rest of the block table."""

    def __init__(self, lengths, s_q=1, h_q=128, h_k=1, page=64, dtype=BF16, spare_pages=3):
        used = [-(-n // page) for n in lengths]
        self.cache = poisoned((sum(used) + spare_pages, page, h_k, D), dtype, "cuda")
        width = max([*used, 1]) + 1
        order = torch.randperm(len(self.cache)).tolist()
        table = GARBAGE.repeat(len(lengths) * width)[: len(lengths) * width].view(len(lengths), width).clone()
        self.slots = []
        for b, n in enumerate(lengths):
            own = torch.tensor([order.pop() for _ in range(used[b])], dtype=torch.int64)
            table[b, : used[b]] = own
            slots = (own[:, None] * page + torch.arange(page)).view(-1)[:n].cuda()
            self.cache.view(-1, h_k, D)[slots] = normal(n, h_k, D, dtype=dtype)
            self.slots.append(slots)
        self.q = normal(len(lengths), s_q, h_q, D, dtype=dtype)
        self.table, self.lengths, self.s_q = table.cuda(), int32(lengths), s_q

    def run(self, plan=None, splits=None, rows=slice(None), **options):
        """Of all sequences, or of these rows."""
        own = (x[rows] for x in (self.table, self.lengths))
        return dsa.flash_mla_with_kvcache(self.q[rows], self.cache, *own, D_V, plan, splits, **options)

    def expected(self, causal=False, scale=D**-0.5, lengths=None):
        out, lse = [], []
        flat = self.cache.view(-1, *self.cache.shape[2:])
        for b, n in enumerate(self.lengths.tolist() if lengths is None else lengths):
            keys, last = flat[self.slots[b][:n]], torch.full((self.s_q, 1), n - 1, device="cuda")
            if causal:
                last += torch.arange(1 - self.s_q, 1, device="cuda")[:, None]
            row, row_lse = attend(self.q[b], keys, keys[..., :D_V], torch.arange(n, device="cuda") <= last, scale)
            out.append(row)
            lse.append(row_lse.T)
        return torch.stack(out), torch.stack(lse)

    def check(self, record_error=None, got=None, causal=False, lengths=None, **options):
        """lengths: how many of the slots hold keys, where it is not the lengths that are given."""
        poison_free_memory(mebibytes=64)
        got = self.run(causal=causal, **options) if got is None else got
        expected = self.expected(causal, options.get("softmax_scale", D**-0.5), lengths)
        assert got[0].dtype == self.q.dtype
        assert_attention(got, expected, TOLERANCE, LSE_TOLERANCE, record_error)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("s_q", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("h_q", "h_k"),
    [(1, 1), (3, 1), (8, 1), (9, 3), (16, 1), (32, 1), (63, 1), (64, 1), (96, 1), (126, 2), (128, 1), (128, 8)],
)
def test_heads_and_queries(h_q, h_k, s_q, causal, record_error):
    Case([700, *BOUNDARIES, 5000], s_q, h_q, h_k).check(record_error, causal=causal)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("h_q", [16, 128])
@pytest.mark.parametrize("page", [16, 32, 48, 64, 80, 96, 128, 256])
def test_pages(page, h_q, dtype, record_error):
    Case([*BOUNDARIES, 3333], 2, h_q, page=page, dtype=dtype).check(record_error, causal=True)


@pytest.mark.parametrize("h_q", [64, 128])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    "lengths", [[1], [64], [130], [100_000], [40_000, 3], [2048] * 9, [777] * 300, [0] * 5, [20_000] * 70]
)
def test_splits(lengths, invariant, h_q, record_error):
    Case(lengths, 1, h_q).check(record_error, enable_batch_invariant=invariant)


def test_many_sequences(record_error):
    Case(torch.randint(0, 200, (5000,)).tolist(), 1, 8).check(record_error)


def test_a_million_tokens():
    case = Case([1_000_003, 70], 1, 16)
    for options in ({}, {"enable_batch_invariant": True}):
        case.check(**options)


@pytest.mark.parametrize("h_q", [16, 128])
def test_large_logits(h_q, record_error):
    """Logits of 10^4: a softmax of few keys, and powers that would overflow if they were not relative."""
    case = Case([500, 65, 3000], 2, h_q)
    flat = case.cache.view(-1, 1, D)
    for b, slots in enumerate(case.slots):
        towards = torch.linspace(-1, 1, len(slots), device="cuda")[torch.randperm(len(slots))]
        flat[slots, 0] = (flat[slots, 0].float() + 8 * towards[:, None] * case.q[b, 0, 0].float()).bfloat16()
    case.q *= 8000
    case.check(record_error, causal=True)
    assert case.expected(causal=True)[1].abs().max() > 1e4


def test_the_maximum_rises_from_tile_to_tile(record_error):
    """Every tile's largest logit above the last one's, by less and by more than O is rescaled for; and falling."""
    case = Case([1024] * 6, 1, 64)
    flat = case.cache.view(-1, 1, D)
    for b, step in enumerate((0.5, 3.0, 6.0, 20.0, -6.0, 0.0)):
        direction = case.q[b].float().mean((0, 1)).sign()
        tile = torch.arange(1024, device="cuda") // TILE
        lift = direction * (tile[:, None] * step / 8)
        flat[case.slots[b], 0] = (flat[case.slots[b], 0].float() * 0.1 + lift / 4).bfloat16()
    case.check(record_error)


def test_one_key_gives_its_value_exactly():
    case = Case([1, 1, 1], 1, 128)
    out, lse = case.run()
    keys = case.cache.view(-1, D)[torch.cat(case.slots)]
    assert torch.equal(out, keys[:, None, None, :D_V].expand(-1, 1, 128, -1))
    logits = torch.einsum("bshd,bd->bhs", case.q.double(), keys.double()) * D**-0.5
    assert_close("lse", lse, logits, **LSE_TOLERANCE)


def test_pages_outside_the_cache_hold_no_keys():
    case = Case([300, 300, 128], 1, 64)
    case.table[0, 1], case.table[1, 4], case.table[2, :2] = -1, len(case.cache), 10**9
    position = torch.arange(300, device="cuda")
    case.slots[0] = case.slots[0][position // TILE != 1]
    case.slots[1] = case.slots[1][position // TILE != 4]
    case.check(lengths=[len(case.slots[0]), len(case.slots[1]), 0])


def test_lengths_beyond_the_block_table():
    case = Case([200, 100], 1, 64)
    case.table = case.table[:, :2]
    case.lengths = int32([2**31 - 1, 100])
    case.check(lengths=[128, 100])


def test_softmax_scale_and_both_styles_of_plan():
    case = Case([700, 0, 5000, 64], 2, 128)
    old = dsa.get_mla_metadata(case.lengths, 256, 1)
    new, nothing = dsa.get_mla_metadata()
    got = [case.run(*plan, softmax_scale=0.1, causal=True) for plan in (old, (new, nothing), (new, None), (None, None))]
    for own in got[:2]:  # the old style's plan knows nothing of the block table, and cuts sequences elsewhere
        case.check(got=own, causal=True, softmax_scale=0.1)
    assert_same_bits(got[2:], (got[1], got[1]))


@pytest.mark.parametrize("h_q", [16, 64, 128])
def test_batch_invariant(h_q):
    """A sequence's result in a batch, in another order, and alone, bit for bit; and not so by chance."""
    case = Case([2500, 64, 9000, 0, 40_000, 2048, 2049], 2, h_q)
    options = {"causal": True, "enable_batch_invariant": True}
    whole = case.run(**options)
    for rows in (torch.randperm(7, device="cuda"), *torch.arange(7, device="cuda").split(1)):
        assert_same_bits(case.run(rows=rows, **options), [x[rows] for x in whole])
    assert not torch.equal(case.run(causal=True)[0][4], case.run(causal=True, rows=slice(4, 5))[0][0])
    # A wider block table says nothing about the sequences.
    case.table = torch.nn.functional.pad(case.table, (0, 5000), value=-1)
    assert_same_bits(case.run(**options), whole)


@pytest.mark.parametrize("h_q", [16, 128])
def test_runs_are_bit_identical(h_q):
    case = Case([2500, 64, 9000, 0, 40_000, 777, 1], 2, h_q)
    assert_runs_have_the_same_bits(case.run, *dsa.get_mla_metadata(case.lengths, 2 * h_q, 1), times=200)


def test_strides():
    """q, cache, table and lengths as parts of larger tensors; q even with channels far apart."""
    case = Case([700, 65, 2000], 2, 64, h_k=2)
    expected = case.run()
    case.cache = among_nan(case.cache)
    case.table = torch.stack((case.table, case.table), 1)[:, 1]
    case.lengths = torch.stack((case.lengths, case.lengths), 1)[:, 1]
    for q in (
        torch.stack((case.q, case.q), 2)[:, :, 1],
        torch.nn.functional.pad(case.q, (1, 2))[..., 1 : D + 1],
        case.q.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        case.q = q
        assert_same_bits(case.run(), expected)


def test_a_cache_beyond_2_to_the_31_numbers():
    case = Case([100, 200], 1, 16)
    pages = 2**31 // (TILE * D) + 100
    expected, small, first = case.run(), case.cache, pages - len(case.cache)
    case.cache = torch.empty(pages, TILE, 1, D, dtype=BF16, device="cuda")
    case.cache[first:] = small
    case.table = torch.where((case.table >= 0) & (case.table < len(small)), case.table + first, case.table)
    assert_same_bits(case.run(), expected)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("s_q", [1, 3])
@pytest.mark.parametrize(("h_q", "h_k"), [(1, 1), (16, 1), (126, 2), (128, 1)])
def test_into_a_part_of_a_tensor(h_q, h_k, s_q, dtype):
    """Of one with more heads, whose other numbers stay as they are; with the same bits, of sequences that are split and
    of whole ones."""
    case = Case([700, *BOUNDARIES, 9000], s_q, h_q, h_k, dtype=dtype)
    for options in ({"causal": True}, {"enable_batch_invariant": True}):
        assert_writes_a_part(functools.partial(case.run, **options), case.run(**options))


@pytest.mark.parametrize("style", ["planned in the graph", "planned before it", "batch-invariant"])
@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("h_q", [16, 128])
def test_graph_replay_with_new_lengths(h_q, into, style):
    """The graph is captured for short sequences and replayed for long, empty and again short ones. into: the caller's
    memory, a part of more heads."""
    lengths = [[5, 60, 0, 1], [3000, 64, 9000, 0], [0, 0, 0, 0], [1, 4000, 65, 20_000]]
    case = Case([max(column) for column in zip(*lengths)], 2, h_q)
    case.lengths.copy_(int32(lengths[0]))
    kept = dsa.get_mla_metadata(case.lengths, 2 * h_q, 1) if style == "planned before it" else (None, None)
    whole = torch.full((len(case.q), 2, h_q + 8, D_V), NAN, dtype=case.q.dtype, device="cuda")
    options = {"causal": True, "enable_batch_invariant": style == "batch-invariant"}
    options |= {"out": whole[:, :, 4:-4]} if into else {}

    def call(_):
        plan = dsa.get_mla_metadata() if style == "planned in the graph" else kept
        return case.run(*plan, **options)

    rest = iter(lengths)
    for out, lse in replays(call, (case.lengths,), lambda: int32(next(rest)), times=len(lengths)):
        case.check(got=(out.contiguous(), lse), causal=True)
        assert whole[:, :, :4].isnan().all() and whole[:, :, -4:].isnan().all()


@pytest.mark.parametrize("dim", [0, 1])
def test_one_page_or_key_in_the_place_of_many(dim):
    """A stride of 0."""
    case = Case([700, 64, 0, 2000], 2, 16)
    case.cache = torch.randn_like(case.cache).clamp(-1, 1)
    whole = case.cache.narrow(dim, 0, 1).expand_as(case.cache)
    case.cache = whole.contiguous()
    expected = case.run()
    case.cache = whole
    assert_same_bits(case.run(), expected)


def test_a_plan_that_comes_with_a_graph_serves_that_graph_alone():
    """A call outside, or in another graph, before the graph is ever replayed, finds nothing in it."""
    case, (meta, _) = Case([700, 64, 20_000], 2, 16), dsa.get_mla_metadata()
    case.run()  # compiles outside of a capture
    graphs, got = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            got.append([case.run(meta, causal=True) for _ in range(2)])
    in_graph = meta.tile_scheduler_metadata
    case.check(got=case.run(meta, causal=True), causal=True)
    assert meta.tile_scheduler_metadata is not in_graph and meta.capture is None
    for graph, results in zip(reversed(graphs), reversed(got)):
        graph.replay()
        for result in results:
            case.check(got=result, causal=True)


def test_plans_are_made_without_waiting_for_the_host():
    """Nor is anything copied from it: what would wait is an error in a capture."""
    lengths = int32([700, 64, 0, 2000])
    requests = ((lengths, 16, 1), (lengths, 16, 1, 16, True, 2048))

    def plans():
        return [dsa.get_mla_metadata(*request) for request in requests]

    graph, got = captured(plans)
    graph.replay()
    assert_same_bits(got, plans())


@pytest.mark.parametrize(
    "lengths",
    [
        [4096] * 128,
        [131072],
        [1],
        [0],
        [0, 0, 5, 0],
        [64] * 1000,
        [100_000, 1, 1, 1],
        [i * i * 8 % 50_000 for i in range(77)],
        [7] * 40_0,
    ],
    ids=lambda lengths: f"{len(lengths)} of {max(lengths)}",
)
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("rows", "h_k"), [(16, 1), (128, 1), (1024, 8)])
def test_plan(lengths, rows, h_k, known):
    """Every tile belongs to one part; parts are full up to the mean and one overhead; splits are numbered. known: how
    long they may be, which decides how many parts there are and what beginning a sequence costs."""
    most = max(lengths) if known else 0
    _, overhead = _parts(int32(lengths), rows, h_k, most)
    plan, splits = (x.tolist() for x in _mla_metadata(int32(lengths), rows, h_k, most))
    tiles = [-(-n // TILE) for n in lengths]
    cuts, costs, numbers = [[] for _ in lengths], [], [0]
    for first, tile, last, end, index, *_ in plan:
        cost = 0
        for b in range(first, last + 1):
            stop = end if b == last and end < 2**30 else tiles[b]
            assert len(cuts[b]) == (index if b == first else 0)
            cuts[b].append((tile if b == first else 0, stop))
            cost += stop - cuts[b][-1][0] + overhead
        costs.append(cost)
    for b, own in enumerate(cuts):
        assert own[0][0] == 0 and own[-1][1] == tiles[b] and all(x[1] == y[0] for x, y in itertools.pairwise(own))
        numbers.append(numbers[-1] + (len(own) if len(own) > 1 else 0))
    assert splits == numbers
    assert max(costs) <= -(-sum(t + overhead for t in tiles) // len(plan)) + overhead
    many = [b for b, own in enumerate(cuts) if len(own) > 1]
    assert [row[5] for row in plan] == many + [-1] * (len(plan) - len(many))


def test_the_kernels_run_on_the_current_stream():
    case = Case([700, 5000], 1, 128)

    def call(*_):
        return case.run()

    assert_runs_on_the_current_stream(call, case.q, case.cache, case.table, case.lengths)


@pytest.mark.parametrize("lengths", [[1], [0, 64, 3], [100_000, 1, 1], [777] * 300])
def test_every_number_of_a_plan_is_written(lengths):
    """Into memory that holds others. The two that mean nothing are 0."""
    expected = dsa.get_mla_metadata(int32(lengths), 16, 1)
    got = [poisoned(x.shape, torch.int32, "cuda") for x in expected]
    compile_mla_plan()(int32(lengths), *got, OVERHEAD)
    assert_same_bits(got, expected)
    assert all(x.ne(torch.iinfo(torch.int32).min).all() for x in got) and got[0][:, 6:].eq(0).all()
